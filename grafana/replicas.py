"""The dashboard of the replicas: load, hardware, failovers."""

from grafana.panels import ENGINE, HALF, QUARTER, TTFT, Row, lines, quantile, total_rate

LOAD: Row = (
    "Load",
    [
        lines(
            "Running",
            "Running sequences, and their limit",
            "none",
            (f"serve_app_requests_running{{{ENGINE}}}", "{{replica}} on {{node}}"),
            (f"serve_app_max_num_seqs{{{ENGINE}}}", "limit, {{replica}}"),
        ),
        lines(
            "Output",
            "Sampled tokens per second",
            "none",
            (total_rate("serve_app_sampled_tokens_total", ENGINE, by="replica"), "{{replica}}"),
        ),
        lines(
            "Busy",
            "Share of time spent in steps",
            "percentunit",
            (total_rate("serve_app_engine_busy_seconds_total", ENGINE, by="replica"), "{{replica}}"),
            highest=1,
        ),
        lines(
            "KV pool",
            "Share of the blocks in use by requests",
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
    """Return the query of the share of the device's limit that steps use while they run."""
    done = total_rate(f"serve_app_step_{what}_total", ENGINE, by="replica")
    busy = total_rate("serve_app_engine_busy_seconds_total", ENGINE, by="replica")
    return f"{done} / {busy} / sum by (replica) (serve_app_device_{what}_per_second{{{ENGINE}}})"


HARDWARE: Row = (
    "Hardware",
    [
        lines(
            "Processor",
            "CPU cores in use by each process",
            "none",
            ('rate(process_cpu_seconds_total{job="serve_app"}[$__rate_interval])', "{{deployment}} {{replica}}"),
            span=QUARTER,
        ),
        lines(
            "Memory",
            "Resident memory of each process, its buffers and their limits",
            "bytes",
            ('process_resident_memory_bytes{job="serve_app"}', "{{deployment}} {{replica}}"),
            ("sum by (kind) (serve_app_held_bytes)", "{{kind}}"),
            ("sum by (kind) (serve_app_held_bytes_limit)", "{{kind}}, limit"),
            span=QUARTER,
        ),
        lines(
            "GPU busy",
            "Share of time, as reported by NVML; empty without a GPU",
            "percentunit",
            (f"serve_app_gpu_utilization_ratio{{{ENGINE}}}", "{{replica}} GPU {{gpu}}"),
            span=QUARTER,
            highest=1,
        ),
        lines(
            "GPU memory",
            "Share in use; empty without a GPU",
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
    "Efficiency",
    [
        lines(
            "Memory bandwidth",
            "Weights, keys and values read per step time, relative to a copy's rate at start; near 1 for decodes",
            "percentunit",
            (used("bytes"), "{{replica}}"),
            span=HALF,
        ),
        lines(
            "Arithmetic",
            "Operations per step time, relative to a large product's rate at start; near 1 for long prompts, "
            "perhaps above 1 in 8 bits",
            "percentunit",
            (used("flops"), "{{replica}}"),
            span=HALF,
        ),
    ],
)
FAILOVER: Row = (
    "Failover",
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
            "Attempts that a replica lost, and replicas that were considered stalled but answered later",
            "none",
            ("sum by (reason) (increase(serve_app_failovers_total[$__rate_interval]))", "{{reason}}"),
            ("sum(increase(serve_app_false_alarms_total[$__rate_interval]))", "false alarms"),
            span=QUARTER,
            stacked=True,
        ),
        lines(
            "Replayed tokens",
            "Per second: known tokens of these requests, which another replica computes again",
            "none",
            (total_rate("serve_app_replayed_tokens_total"), "replayed"),
            span=QUARTER,
        ),
        lines(
            "The ingress",
            "Sequences in engines, tasks of its event loop, errors of background tasks, unusable files",
            "none",
            ("serve_app_ingress_requests_ongoing", "ongoing"),
            ("serve_app_ingress_tasks", "tasks"),
            ("increase(serve_app_task_errors_total[$__rate_interval])", "errors of background tasks"),
            ("serve_app_keys_file_invalid", "keys file invalid"),
            ("serve_app_ledger_unusable", "ledger unusable"),
            span=QUARTER,
        ),
    ],
)

ROWS = (LOAD, HARDWARE, EFFICIENCY, FAILOVER)
