"""The dashboard of the replicas: the load of each, its hardware, who came and went."""

from grafana.panels import ENGINE, HALF, QUARTER, TTFT, Row, lines, quantile, total_rate

LOAD: Row = (
    "Load of each",
    [
        lines(
            "Running",
            "Running sequences, and how many may run",
            "none",
            (f"serve_app_requests_running{{{ENGINE}}}", "{{replica}} on {{node}}"),
            (f"serve_app_max_num_seqs{{{ENGINE}}}", "at most, {{replica}}"),
        ),
        lines(
            "Output",
            "Sampled tokens per second",
            "none",
            (total_rate("serve_app_sampled_tokens_total", ENGINE, by="replica"), "{{replica}}"),
        ),
        lines(
            "Busy",
            "Part of time spent in steps",
            "percentunit",
            (total_rate("serve_app_engine_busy_seconds_total", ENGINE, by="replica"), "{{replica}}"),
            highest=1,
        ),
        lines(
            "KV pool",
            "Part of the blocks that requests hold",
            "percentunit",
            (f"serve_app_kv_blocks_used{{{ENGINE}}} / serve_app_kv_blocks_total{{{ENGINE}}}", "{{replica}}"),
            highest=1,
        ),
        lines(
            "First token at the engine",
            "95th percentile, from arrival at the replica",
            "s",
            (quantile(0.95, TTFT, f'where="engine", {ENGINE}', by="replica"), "{{replica}}"),
        ),
        lines(
            "Step time",
            "95th percentile",
            "s",
            (quantile(0.95, "serve_app_step_seconds", ENGINE, by="replica"), "{{replica}}"),
        ),
    ],
)


def used(what: str) -> str:
    """Part of what the device can do that steps made use of, while they ran."""
    done = total_rate(f"serve_app_step_{what}_total", ENGINE, by="replica")
    busy = total_rate("serve_app_engine_busy_seconds_total", ENGINE, by="replica")
    return f"{done} / {busy} / sum by (replica) (serve_app_device_{what}_per_second{{{ENGINE}}})"


HARDWARE: Row = (
    "Hardware",
    [
        lines(
            "Processor",
            "Cores that each process uses",
            "none",
            ('rate(process_cpu_seconds_total{job="serve_app"}[$__rate_interval])', "{{deployment}} {{replica}}"),
            span=QUARTER,
        ),
        lines(
            "Memory",
            "Resident memory of each process, and how full its buffers are",
            "bytes",
            ('process_resident_memory_bytes{job="serve_app"}', "{{deployment}} {{replica}}"),
            ("sum by (kind) (serve_app_held_bytes)", "{{kind}}"),
            ("sum by (kind) (serve_app_held_bytes_limit)", "{{kind}}, at most"),
            span=QUARTER,
        ),
        lines(
            "GPU busy",
            "Part of time, as NVML counts it; nothing without a GPU",
            "percentunit",
            (f"serve_app_gpu_utilization_ratio{{{ENGINE}}}", "{{replica}} GPU {{gpu}}"),
            span=QUARTER,
            highest=1,
        ),
        lines(
            "GPU memory",
            "Part in use; nothing without a GPU",
            "percentunit",
            (
                f"serve_app_gpu_memory_used_bytes{{{ENGINE}}} / serve_app_gpu_memory_total_bytes{{{ENGINE}}}",
                "{{replica}} GPU {{gpu}}",
            ),
            span=QUARTER,
            highest=1,
        ),
    ],
)
EFFICIENCY: Row = (
    "How well steps use it",
    [
        lines(
            "Memory bandwidth",
            "Weights, keys and values read in a step's time, as a part of a copy's rate at start; decodes come near 1",
            "percentunit",
            (used("bytes"), "{{replica}}"),
            span=HALF,
        ),
        lines(
            "Arithmetic",
            "Operations in a step's time, as a part of a large product's rate at start; long prompts come near 1, "
            "products in 8 bits may go beyond",
            "percentunit",
            (used("flops"), "{{replica}}"),
            span=HALF,
        ),
    ],
)
FAILOVER: Row = (
    "Coming and going",
    [
        lines(
            "Processes that answer",
            "Metrics ports",
            "none",
            ('sum by (deployment) (up{job="serve_app"})', "{{deployment}}"),
            span=QUARTER,
        ),
        lines(
            "Failovers",
            "Attempts that a replica lost, and replicas that were taken for stalled and answered later",
            "none",
            ("sum by (reason) (increase(serve_app_failovers_total[$__rate_interval]))", "{{reason}}"),
            ("sum(increase(serve_app_false_alarms_total[$__rate_interval]))", "false alarms"),
            span=QUARTER,
            stacked=True,
        ),
        lines(
            "Replayed tokens",
            "Per second: known tokens of such requests, which another replica computes again",
            "none",
            (total_rate("serve_app_replayed_tokens_total"), "replayed"),
            span=QUARTER,
        ),
        lines(
            "The ingress",
            "Sequences handed to engines, tasks of its event loop, errors of those that last, unusable files",
            "none",
            ("serve_app_ingress_requests_ongoing", "ongoing"),
            ("serve_app_ingress_tasks", "tasks"),
            ("increase(serve_app_task_errors_total[$__rate_interval])", "errors of lasting tasks"),
            ("serve_app_keys_file_invalid", "keys file invalid"),
            ("serve_app_ledger_unusable", "ledger unusable"),
            span=QUARTER,
        ),
    ],
)

ROWS = (LOAD, HARDWARE, EFFICIENCY, FAILOVER)
