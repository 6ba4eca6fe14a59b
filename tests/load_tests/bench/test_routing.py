"""The comparison of routers: its workload, its figures, its verdict, and what Ray's routers are
given."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from load_tests.bench.routing import build_prefix_groups, parse_counters, prefix_figures, verdict
from serve_app.workloads.prompts import open_writer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own modules
    from load_tests.bench.routing_rivals import PrefixTreeRouter

HITS, QUERIES = "serve_app_prefix_cache_hit_tokens_total", "serve_app_prefix_cache_query_tokens_total"


def page(**replicas: tuple[float, float]) -> str:
    lines = []
    for number, name in enumerate((HITS, QUERIES)):
        lines.append(f"# TYPE {name.removesuffix('_total')} counter")
        lines += [f'{name}{{replica="{replica}"}} {values[number]}' for replica, values in replicas.items()]
    return "\n".join(lines) + "\n"


def run(**figures: Any) -> dict[str, Any]:
    usual = {"failures": 0, "wrong_length": 0, "errors": [], "busiest_share": 0.4, "seconds": 9.0, "foreign_cores": 0.0}
    return usual | {"hit_rate": 0.6, "ttft_mean_ms": 100.0, "ttft_p50_ms": 90.0, "ttft_p99_ms": 200.0} | figures


def test_every_prefix_has_its_requests_and_another_repeat_other_texts() -> None:
    writer = open_writer("default")
    first, other = (build_prefix_groups(writer, repeat, 12) for repeat in (0, 1))
    assert len(first.items) == 96
    prefixes = [tuple(writer.ids(item.prompt)[:512]) for item in first.items]
    assert {prefixes.count(prefix) for prefix in prefixes} == {4}
    assert prefixes != sorted(prefixes, key=prefixes.index), "they are shuffled"
    assert not {item.prompt for item in first.items} & {item.prompt for item in other.items}


def test_figures_are_of_the_time_between_two_pages() -> None:
    before = parse_counters(page(a=(100, 1000), b=(0, 500)))
    after = parse_counters(page(a=(400, 1600), b=(100, 900)))
    assert prefix_figures(before, after) == {"hit_rate": 0.4, "busiest_share": 0.6}


@pytest.mark.parametrize(
    ("ours", "fault"),
    [
        (run(), ""),
        (run(hit_rate=0.44), "1.47 times"),
        (run(ttft_mean_ms=120.0), "time to first token"),
        (run(failures=1, errors=["HTTP 500"]), "HTTP 500"),
    ],
)
def test_the_verdict_names_what_was_not_reached(ours: dict[str, Any], fault: str) -> None:
    faults = verdict({"serve_app": [ours], "power_of_two": [run(hit_rate=0.3, ttft_mean_ms=120.0)]})
    assert len(faults) == bool(fault)
    assert fault in "".join(faults)


def test_the_prefix_tree_gets_one_character_for_each_token() -> None:
    router = PrefixTreeRouter.__new__(PrefixTreeRouter)
    ids = [0, 65, 0xD7FF, 0xD800, 0xDFFF, 128_000]
    text = router._extract_text_from_request(SimpleNamespace(args=[{"prompt_token_ids": ids}]))
    assert len(text) == len(set(text)) == len(ids)
    text.encode("utf-8")
