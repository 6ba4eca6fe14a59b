"""The dashboard for tuning batches: running and waiting requests, work of a step, the KV pool."""

from grafana.panels import ENGINE, Row, lines, quantile, quantiles, spread, total_rate

STEPS = total_rate("serve_app_step_seconds_count", ENGINE)


def computed(phase: str) -> str:
    """Tokens computed per second in this phase."""
    return total_rate("serve_app_computed_tokens_total", f'phase="{phase}", {ENGINE}')


ADMISSION: Row = (
    "Who runs and who waits",
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
            "What the admission gate compares with engine.waiting_served_ratio; the fleet's, with the queue",
            "none",
            (f'serve_app_waiting_served_ratio{{scope="", {ENGINE}}}', "{{replica}}"),
            ('serve_app_waiting_served_ratio{scope="fleet"}', "fleet"),
        ),
    ],
)
STEP: Row = (
    "What a step computes",
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
            "Per second; prompt chunks compute tokens without sampling any",
            "none",
            (total_rate("serve_app_sampled_tokens_total", ENGINE, by="replica"), "{{replica}}"),
            stacked=True,
        ),
        lines(
            "Speculation",
            "Per second: tokens guessed and computed beside the next one, and those that were right",
            "none",
            (total_rate("serve_app_draft_tokens_total", ENGINE), "guessed"),
            (total_rate("serve_app_accepted_tokens_total", ENGINE), "right"),
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
            "Per second: rows of steps that sampled by a grammar; tokens that a grammar left no choice about",
            "none",
            (total_rate("serve_app_constrained_rows_total", ENGINE), "rows"),
            (total_rate("serve_app_forced_tokens_total", ENGINE), "forced tokens"),
        ),
        lines(
            "Grammar masks",
            "Processor time per second, in a thread beside the model's",
            "s",
            (total_rate("serve_app_grammar_mask_seconds_total", ENGINE, by="replica"), "{{replica}}"),
        ),
        lines(
            "Building grammars",
            "At the ingress, before the request goes on",
            "s",
            *quantiles("serve_app_grammar_build_seconds"),
        ),
        lines(
            "Constraints refused",
            "Per second: too large, no grammar, not to be enforced, or without any text",
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
            "Blocks: held by requests; free, but still holding a prefix; free",
            "none",
            (f"sum(serve_app_kv_blocks_used{{{ENGINE}}})", "held"),
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
            "Part of the admitted requests' tokens that was in the cache",
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
            "Requests per second that gave their blocks up and are computed again",
            "none",
            (total_rate("serve_app_preemptions_total", ENGINE, by="replica"), "{{replica}}"),
        ),
    ],
)

ROWS = (ADMISSION, STEP, GRAMMARS, MEMORY)
