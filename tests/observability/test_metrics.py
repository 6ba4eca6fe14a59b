"""Counters count what happened, and one page holds what several processes said."""

import ast
import urllib.request
from collections.abc import Collection
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

import serve_app
from serve_app.api.request_events import REFUSAL_REASONS
from serve_app.core.step_cost import DeviceLimits
from serve_app.core.step_plan import ScheduledRequest
from serve_app.core.step_record import SchedulerStats, StepRecord
from serve_app.errors import OverloadedError, RequestTimeoutError, UnavailableError
from serve_app.observability.metrics import EngineMetrics, IngressMetrics, merge_expositions
from serve_app.observability.metrics_port import serve_registry


def step(**fields: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": 1,
        "started_at": 10.0,
        "schedule_s": 0.001,
        "model_s": 0.02,
        "update_s": 0.004,
        "rows": (),
        "num_prefill_tokens": 30,
        "num_decode_tokens": 4,
        "num_output_tokens": 5,
        "prefix_hit_tokens": 16,
        "prefix_queried_tokens": 46,
        "preempted": (("a", 0),),
        "admitted": (),
        "finished": (),
        "gate_open": True,
        "stats": SchedulerStats(waiting=0, running=0, blocks_total=1, blocks_used=0, blocks_cached=0),
    }
    return StepRecord(**(values | fields))


def samples(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_steps_are_counted() -> None:
    metrics = EngineMetrics()
    metrics.on_step(step())
    metrics.on_step(
        step(
            started_at=11.0,
            num_prefill_tokens=0,
            preempted=(),
            num_draft_tokens=3,
            num_accepted_tokens=1,
            num_forced_tokens=1,
            mask_s=0.125,
            rows=(
                ScheduledRequest(0, "a", 0, 5, 3, (), True, False, constrained=True),
                ScheduledRequest(1, "b", 0, 0, 8, (), False, True, constrained=True),
                ScheduledRequest(2, "c", 0, 5, 1, (), True, False),
            ),
            num_bytes=5_000,
            num_flops=70_000,
        )
    )
    metrics.set_limits(DeviceLimits(bytes_per_s=1e9, flops_per_s=1e12))
    metrics.first_token(0.25)
    value = metrics.registry.get_sample_value
    assert value("serve_app_step_bytes_total") == 5_000
    assert value("serve_app_step_flops_total") == 70_000
    assert value("serve_app_device_bytes_per_second") == 1e9
    assert value("serve_app_device_flops_per_second") == 1e12
    assert value("serve_app_computed_tokens_total", {"phase": "prefill"}) == 30
    assert value("serve_app_computed_tokens_total", {"phase": "decode"}) == 8
    assert value("serve_app_sampled_tokens_total") == 10
    assert value("serve_app_draft_tokens_total") == 3
    assert value("serve_app_accepted_tokens_total") == 1
    assert value("serve_app_constrained_rows_total") == 1
    assert value("serve_app_forced_tokens_total") == 1
    assert value("serve_app_grammar_mask_seconds_total") == 0.125
    assert value("serve_app_preemptions_total") == 1
    assert value("serve_app_prefix_cache_hit_tokens_total") == 32
    assert value("serve_app_prefix_cache_query_tokens_total") == 92
    assert value("serve_app_step_seconds_count") == 2
    assert value("serve_app_step_seconds_sum") == pytest.approx(0.05)
    assert value("serve_app_engine_busy_seconds_total") == pytest.approx(0.05)
    assert value("serve_app_batch_tokens_sum") == 38
    assert value("serve_app_time_to_first_token_seconds_sum", {"where": "engine"}) == 0.25


def test_gauges_ask_the_engine_when_scraped() -> None:
    metrics = EngineMetrics()
    assert metrics.registry.get_sample_value("serve_app_requests_waiting") is None
    stats = SchedulerStats(waiting=6, running=4, blocks_total=100, blocks_used=40, blocks_cached=7)
    metrics.read_stats_from(lambda: stats)
    value = metrics.registry.get_sample_value
    assert value("serve_app_requests_waiting") == 6
    assert value("serve_app_requests_running") == 4
    assert value("serve_app_waiting_served_ratio") == 1.5
    assert value("serve_app_kv_blocks_used") == 40
    assert value("serve_app_kv_blocks_total") == 100
    assert value("serve_app_kv_blocks_cached") == 7


def test_without_a_gpu_there_are_no_gpu_series() -> None:
    assert b"gpu" not in generate_latest(EngineMetrics().registry)


def stand_in_for_nvml(patch: pytest.MonkeyPatch, failing: Collection[str]) -> None:
    """NVML's functions for one GPU; each of `failing` raises as NVML does."""
    answers: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=40),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3, total=8),
    }

    def call(name: str, *_: Any) -> Any:
        if name in failing:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return answers[name]

    for name in answers:
        patch.setattr(pynvml, name, partial(call, name))


def gpu_series() -> dict[str, float]:
    metrics = EngineMetrics(gpu_ids=["0"])
    metrics.on_step(step())
    page = samples(generate_latest(metrics.registry))
    assert page["serve_app_preemptions_total", ()] == 1
    return {name: value for (name, labels), value in page.items() if labels == (("gpu", "0"),)}


@pytest.mark.parametrize(
    ("failing", "missing"),
    [
        ([], set()),
        (["nvmlDeviceGetUtilizationRates"], {"utilization_ratio"}),  # as under MIG
        (["nvmlDeviceGetMemoryInfo"], {"memory_used_bytes", "memory_total_bytes"}),
        (["nvmlInit", "nvmlDeviceGetHandleByIndex"], {"utilization_ratio", "memory_used_bytes", "memory_total_bytes"}),
    ],
)
def test_what_nvml_does_not_tell_is_absent_and_the_rest_stays(
    failing: list[str], missing: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_nvml(monkeypatch, failing)
    known = {"utilization_ratio": 0.4, "memory_used_bytes": 3.0, "memory_total_bytes": 8.0}
    wanted = {f"serve_app_gpu_{name}": value for name, value in known.items() if name not in missing}
    assert gpu_series() == wanted


def test_requests_are_counted_by_outcome_and_only_completed_ones_are_timed() -> None:
    metrics = IngressMetrics(lambda: 3, lambda: 2)
    for outcome in ("completed", "cancelled"):
        metrics.started("chat")
        metrics.first_token(0.1)
        metrics.tokens(1, None)
        metrics.tokens(2, 0.5)
        metrics.finished("chat", outcome, 7, 3, 1.5)
    metrics.tokens(3, None)  # of another choice, whose first token came with two more
    metrics.started("completions")
    value = metrics.registry.get_sample_value
    assert value("serve_app_ingress_queue_depth") == 3
    assert value("serve_app_ingress_requests_ongoing") == 2
    assert value("serve_app_requests_active", {"endpoint": "chat"}) == 0
    assert value("serve_app_requests_active", {"endpoint": "completions"}) == 1
    assert value("serve_app_requests_total", {"endpoint": "chat", "outcome": "cancelled"}) == 1
    assert value("serve_app_request_seconds_count", {"endpoint": "chat"}) == 1
    assert value("serve_app_prompt_tokens_total") == 14
    assert value("serve_app_output_tokens_total") == 9
    assert value("serve_app_inter_token_latency_seconds_count") == 6
    assert value("serve_app_inter_token_latency_seconds_sum") == pytest.approx(1.0)


def test_the_fleet_has_a_waiting_served_ratio_of_its_own() -> None:
    """Beside the replicas', which have no `scope`; what waits at the ingress counts, what runs
    counts once."""
    engines = [6, 4]
    own = IngressMetrics(lambda: 10, lambda: 0, engines=lambda: (engines[0], engines[1]))
    replica = EngineMetrics()
    replica.read_stats_from(lambda: SchedulerStats(6, 4, 100, 40, 7))
    page = samples(merge_expositions(own.registry, {"r0": generate_latest(replica.registry).decode()}))
    ratios = {labels: value for (name, labels), value in page.items() if name == "serve_app_waiting_served_ratio"}
    assert ratios == {(("scope", "fleet"),): 4.0, (("replica", "r0"),): 1.5}
    engines[:] = [0, 0]
    assert own.registry.get_sample_value("serve_app_waiting_served_ratio", {"scope": "fleet"}) == 10


def test_waits_and_refusals_are_counted() -> None:
    metrics = IngressMetrics(lambda: 0, lambda: 0)
    metrics.queued(0.3)
    metrics.refused("queue_full")
    metrics.refused("queue_full")
    metrics.refused("queue_share")
    metrics.grammar_built(0.02)
    metrics.grammar_refused("grammar_invalid")
    value = metrics.registry.get_sample_value
    assert value("serve_app_queue_wait_seconds_sum") == pytest.approx(0.3)
    assert value("serve_app_refusals_total", {"reason": "queue_full"}) == 2
    assert value("serve_app_refusals_total", {"reason": "queue_share"}) == 1
    assert value("serve_app_grammar_build_seconds_sum") == pytest.approx(0.02)
    assert value("serve_app_grammar_refusals_total", {"reason": "grammar_invalid"}) == 1


def test_expected_series_are_there_at_zero() -> None:
    """A counter that begins at its first event never counts that event in a rate."""
    metrics = IngressMetrics(lambda: 0, lambda: 0)
    metrics.expect(["chat"], ["failed"], ["stalled"], ["queue_full"], ["grammar_invalid"])
    value = metrics.registry.get_sample_value
    assert value("serve_app_requests_total", {"endpoint": "chat", "outcome": "failed"}) == 0
    assert value("serve_app_failovers_total", {"reason": "stalled"}) == 0
    assert value("serve_app_refusals_total", {"reason": "queue_full"}) == 0
    assert value("serve_app_grammar_refusals_total", {"reason": "grammar_invalid"}) == 0


CODED = ("OverloadedError", "RequestTimeoutError", "UnavailableError", "_refusal")
UNCOUNTED = {"flood", "keys_file_invalid"}
"""Refused before a request is counted: by the proxy, or for want of a key."""


def test_every_refusal_has_a_series_before_it_happens() -> None:
    codes = {error.default_code for error in (OverloadedError, RequestTimeoutError, UnavailableError)}
    for path in Path(serve_app.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in CODED:
                texts = [keyword.value for keyword in call.keywords if keyword.arg == "code"]
                codes |= {text.value for text in texts if isinstance(text, ast.Constant)}
    assert codes - UNCOUNTED == set(REFUSAL_REASONS)


def test_pages_merge_into_one_with_the_replicas_names() -> None:
    own = IngressMetrics(lambda: 0, lambda: 0)
    own.first_token(0.3)
    replicas = [EngineMetrics(), EngineMetrics()]
    for number, replica in enumerate(replicas):
        for _ in range(number + 1):
            replica.on_step(step())
            replica.first_token(0.2)
    pages = {f"r{i}": generate_latest(replica.registry).decode() for i, replica in enumerate(replicas)}
    page = merge_expositions(own.registry, {**pages, "gone": None})
    merged = samples(page)
    assert merged["serve_app_preemptions_total", (("replica", "r0"),)] == 1
    assert merged["serve_app_preemptions_total", (("replica", "r1"),)] == 2
    count = "serve_app_time_to_first_token_seconds_count"
    assert merged[count, (("where", "ingress"),)] == 1
    assert merged[count, (("replica", "r1"), ("where", "engine"))] == 2
    assert merged["serve_app_scrape_up", (("replica", "r0"),)] == 1
    assert merged["serve_app_scrape_up", (("replica", "gone"),)] == 0
    types = [line.split()[2] for line in page.decode().splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types)), "a family is declared twice"


def test_every_series_has_the_prefix_and_none_tells_a_time_of_birth() -> None:
    page = merge_expositions(
        IngressMetrics(lambda: 0, lambda: 0).registry, {"r": generate_latest(EngineMetrics().registry).decode()}
    )
    names = {family.name for family in text_string_to_metric_families(page.decode())}
    assert {name for name in names if not name.startswith("serve_app_") or name.endswith("_created")} == set()


def test_the_side_port_serves_the_registry() -> None:
    metrics = EngineMetrics()
    metrics.on_step(step())
    port = serve_registry(metrics.registry, "127.0.0.1")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert samples(answer.read())["serve_app_preemptions_total", ()] == 1
