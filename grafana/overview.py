"""The dashboard for operators: users, latency, errors, saturation."""

from grafana.panels import AT_INGRESS, QUARTER, TTFT, Row, lines, number, quantile, quantiles, spread, total_rate

_BETWEEN_TOKENS = "serve_app_inter_token_latency_seconds"

REQUESTS = total_rate("serve_app_requests_total")


def part_of_requests(outcome: str) -> str:
    """Return the query of the share of requests with this outcome."""
    ended = total_rate("serve_app_requests_total", f'outcome="{outcome}"')
    return f"{ended} / {REQUESTS}"


NOW: Row = (
    "Now",
    [
        number("Requests", "Queued and running", "none", "sum(serve_app_requests_active)"),
        number("In the queue", "Sequences", "none", "sum(serve_app_ingress_queue_depth)"),
        number("Replicas", "Engines that answer", "none", 'sum(up{job="serve_app", deployment="EngineReplica"})'),
        number("Output", "Tokens per second", "none", total_rate("serve_app_output_tokens_total")),
        number("First token, p95", "From arrival at the ingress", "s", quantile(0.95, TTFT, AT_INGRESS)),
        number("Failed", "Share of all requests", "percentunit", part_of_requests("failed")),
    ],
)
USERS: Row = (
    "Users",
    [
        lines(
            "Requests by outcome",
            "invalid: bad input. overloaded: refused. cancelled: the client disconnected.",
            "reqps",
            (total_rate("serve_app_requests_total", by="outcome"), "{{outcome}}"),
            stacked=True,
        ),
        lines(
            "Requests in the server",
            "Queued and running",
            "none",
            ("sum by (endpoint) (serve_app_requests_active)", "{{endpoint}}"),
            stacked=True,
        ),
        lines(
            "Tokens",
            "Per second; a prompt's tokens count when its request ends",
            "none",
            (total_rate("serve_app_output_tokens_total"), "output"),
            (total_rate("serve_app_prompt_tokens_total"), "prompt"),
        ),
    ],
)
LATENCY: Row = (
    "Latency",
    [
        lines(
            "Time to first token",
            "From a request's arrival at the ingress, including its time in the queue",
            "s",
            *quantiles(TTFT, AT_INGRESS),
            span=QUARTER,
        ),
        lines(
            "Between tokens",
            "Of one choice, at the ingress; the tokens of one event share its interval",
            "s",
            *quantiles(_BETWEEN_TOKENS),
            span=QUARTER,
        ),
        lines(
            "In the queue",
            "Until admission",
            "s",
            *quantiles("serve_app_queue_wait_seconds"),
            span=QUARTER,
        ),
        lines(
            "Whole request",
            "Completed requests",
            "s",
            *quantiles("serve_app_request_seconds"),
            span=QUARTER,
        ),
        spread("First tokens", "Requests per second by time to first token", "s", TTFT, AT_INGRESS),
        spread("Times between tokens", "Tokens per second by the time since the previous token", "s", _BETWEEN_TOKENS),
    ],
)
ERRORS: Row = (
    "Errors",
    [
        lines(
            "Failed and refused",
            "Share of all requests",
            "percentunit",
            (part_of_requests("failed"), "failed"),
            (part_of_requests("overloaded"), "refused"),
        ),
        lines(
            "Refusals by reason",
            "For lack of capacity or time",
            "reqps",
            (total_rate("serve_app_refusals_total", by="reason"), "{{reason}}"),
        ),
        lines(
            "Failovers by reason",
            "Attempts per second that a replica lost; their requests continued on other replicas",
            "none",
            (total_rate("serve_app_failovers_total", by="reason"), "{{reason}}"),
        ),
    ],
)
SATURATION: Row = (
    "Saturation",
    [
        lines(
            "Sequences",
            "Running and waiting",
            "none",
            ("sum(serve_app_requests_running)", "running"),
            ("sum(serve_app_requests_waiting)", "waiting in engines"),
            ("sum(serve_app_ingress_queue_depth)", "waiting at the ingress"),
            span=QUARTER,
            stacked=True,
        ),
        lines(
            "Waiting-served ratio of the fleet",
            "Waiting sequences, including the ingress's queue, per running sequence",
            "none",
            ('max(serve_app_waiting_served_ratio{scope="fleet"})', "fleet"),
            span=QUARTER,
        ),
        lines(
            "Fullest KV pool",
            "Share of its blocks in use by requests; a full pool preempts requests",
            "percentunit",
            ("max(serve_app_kv_blocks_used / serve_app_kv_blocks_total)", "fullest"),
            span=QUARTER,
            highest=1,
        ),
        lines(
            "Engines busy",
            "Share of the last ten seconds spent in steps",
            "percentunit",
            ("avg(serve_app_engine_busy_ratio)", "mean"),
            ("max(serve_app_engine_busy_ratio)", "busiest"),
            span=QUARTER,
            highest=1,
        ),
    ],
)
KEYS: Row = (
    "API keys",
    [
        lines(
            "Tokens by key",
            "Per second, prompts and outputs, as in the ledger",
            "none",
            (total_rate("serve_app_key_tokens_total", 'kind=~"prompt|output"', by="key"), "{{key}}"),
            stacked=True,
        ),
        lines(
            "Requests by key",
            "By outcome",
            "reqps",
            (total_rate("serve_app_key_requests_total", by="key, outcome"), "{{key}}, {{outcome}}"),
            stacked=True,
        ),
    ],
)

ROWS = (NOW, USERS, LATENCY, ERRORS, SATURATION, KEYS)
