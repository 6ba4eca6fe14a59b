"""The dashboard for tuning batches: running and waiting requests, work of a step, the KV pool."""

from grafana.panels import ENGINE, Row, lines, quantile, quantiles, spread, total_rate

STEPS = total_rate("serve_app_step_seconds_count", ENGINE)


def computed(phase: str) -> str:
    """Tokens computed per second in this phase."""
    return total_rate("serve_app_computed_tokens_total", f'phase="{phase}", {ENGINE}')


ADMISSION: Row = (
    "Running and waiting",
    [
        lines(
            "Running",
            "Running sequences",
            "none",
            (f"serve_app_requests_running{{{ENGINE}}}", "{{replica}}"),
            stacked=True,
        ),
        lines(
            "Waiting",
            "Requests waiting in engines",
            "none",
            (f"serve_app_requests_waiting{{{ENGINE}}}", "{{replica}}"),
            stacked=True,
        ),
        lines(
            "Waiting-served ratio",
            "Compared with engine.waiting_served_ratio by the admission gate; the fleet's includes the queue",
            "none",
            (f'serve_app_waiting_served_ratio{{scope="", {ENGINE}}}', "{{replica}}"),
            ('serve_app_waiting_served_ratio{scope="fleet"}', "fleet"),
        ),
    ],
)
STEP: Row = (
    "Steps",
    [
        lines(
            "Computed tokens",
            "Per second",
            "none",
            (total_rate("serve_app_computed_tokens_total", ENGINE, by="phase"), "{{phase}}"),
            stacked=True,
        ),
        lines(
            "Batch",
            "Mean tokens of a step",
            "none",
            (f"{computed('prefill')} / {STEPS}", "prefill"),
            (f"{computed('decode')} / {STEPS}", "decode"),
            stacked=True,
        ),
        lines(
            "Step time",
            "Schedule, model and update",
            "s",
            *quantiles("serve_app_step_seconds", ENGINE),
        ),
        lines(
            "Largest batches",
            "Tokens of a step, 99th percentile",
            "none",
            (quantile(0.99, "serve_app_batch_tokens", ENGINE, by="replica"), "{{replica}}"),
            (f"serve_app_max_num_batched_tokens{{{ENGINE}}}", "at most, {{replica}}"),
        ),
        lines(
            "Steps",
            "Per second",
            "none",
            (total_rate("serve_app_step_seconds_count", ENGINE, by="replica"), "{{replica}}"),
        ),
        lines(
            "Sampled tokens",
            "Per second; most prompt chunks sample no token",
            "none",
            (total_rate("serve_app_sampled_tokens_total", ENGINE, by="replica"), "{{replica}}"),
            stacked=True,
        ),
        lines(
            "Speculation",
            "Draft tokens per second, and the accepted ones",
            "none",
            (total_rate("serve_app_draft_tokens_total", ENGINE), "drafts"),
            (total_rate("serve_app_accepted_tokens_total", ENGINE), "accepted"),
        ),
        spread(
            "Steps by tokens", "Steps per second by tokens packed into them", "none", "serve_app_batch_tokens", ENGINE
        ),
        spread("Steps by time", "Steps per second by duration", "s", "serve_app_step_seconds", ENGINE),
    ],
)
GRAMMARS: Row = (
    "Constrained output",
    [
        lines(
            "Constrained rows",
            "Per second: rows that sampled with a grammar, and forced tokens (the only ones that a grammar allowed)",
            "none",
            (total_rate("serve_app_constrained_rows_total", ENGINE), "rows"),
            (total_rate("serve_app_forced_tokens_total", ENGINE), "forced tokens"),
        ),
        lines(
            "Grammar masks",
            "CPU time per second, in a separate thread",
            "s",
            (total_rate("serve_app_grammar_mask_seconds_total", ENGINE, by="replica"), "{{replica}}"),
        ),
        lines(
            "Building grammars",
            "At the ingress, before the request is sent to an engine",
            "s",
            *quantiles("serve_app_grammar_build_seconds"),
        ),
        lines(
            "Constraints refused",
            "Per second: too large, invalid, not enforceable, or without a matching text",
            "none",
            (total_rate("serve_app_grammar_refusals_total", by="reason"), "{{reason}}"),
        ),
    ],
)
MEMORY: Row = (
    "Memory",
    [
        lines(
            "KV pool",
            "Blocks: in use by requests; free with a cached prefix; free",
            "none",
            (f"sum(serve_app_kv_blocks_used{{{ENGINE}}})", "used"),
            (f"sum(serve_app_kv_blocks_cached{{{ENGINE}}})", "cached"),
            (
                f"sum(serve_app_kv_blocks_total{{{ENGINE}}} - serve_app_kv_blocks_used{{{ENGINE}}} "
                f"- serve_app_kv_blocks_cached{{{ENGINE}}})",
                "free",
            ),
            stacked=True,
        ),
        lines(
            "Prefix hits",
            "Share of the admitted requests' tokens found in the prefix cache",
            "percentunit",
            (
                f"{total_rate('serve_app_prefix_cache_hit_tokens_total', ENGINE)} "
                f"/ {total_rate('serve_app_prefix_cache_query_tokens_total', ENGINE)}",
                "hits",
            ),
            highest=1,
        ),
        lines(
            "Preemptions",
            "Requests per second whose blocks were freed and which are computed again",
            "none",
            (total_rate("serve_app_preemptions_total", ENGINE, by="replica"), "{{replica}}"),
        ),
    ],
)

ROWS = (ADMISSION, STEP, GRAMMARS, MEMORY)
