"""What the server's histograms can say, and when client and server agree."""

import pytest
from prometheus_client import generate_latest

from load_tests.bench.server_view import Comparison, Histogram, ServerView, compare_views
from serve_app.observability.metrics import EngineMetrics, IngressMetrics, merge_expositions
from serve_app.workloads.client import RequestResult
from serve_app.workloads.mixes import WorkItem

HISTOGRAM = Histogram((0.1, 0.2, 0.4, float("inf")), (10.0, 30.0, 40.0, 41.0))


def exposition(ttft: list[float], gaps: list[float]) -> str:
    """The page of a real ingress that saw these."""
    metrics = IngressMetrics(lambda: 0, lambda: 0)
    for seconds in ttft:
        metrics.first_token(seconds)
        metrics.tokens(1, None)
    for seconds in gaps:
        metrics.tokens(1, seconds)
    # A replica's own view of first tokens stands on the same page and is another figure.
    replica = EngineMetrics()
    for _ in range(100 * len(ttft)):
        replica.first_token(0.001)
    return merge_expositions(metrics.registry, {"one": generate_latest(replica.registry).decode()}).decode()


def result(ttft: float, gaps: list[float], **fields: object) -> RequestResult:
    return RequestResult(WorkItem("", 1, 1), None, ttft, ttft + sum(gaps), gaps, len(gaps) + 1, **fields)  # type: ignore[arg-type]


def test_percentiles_are_interpolated_as_prometheus_does() -> None:
    assert HISTOGRAM.percentile(50) == pytest.approx((0.1 + 0.1 * 10.5 / 20, 0.1, 0.2))
    assert HISTOGRAM.percentile(10) == pytest.approx((0.041, 0.0, 0.1))
    assert HISTOGRAM.percentile(99.9) == (0.4, 0.4, float("inf"))
    assert Histogram((1.0, float("inf")), (0.0, 0.0)).percentile(50) is None


def test_only_what_came_since_counts() -> None:
    before = Histogram(HISTOGRAM.bounds, (10.0, 10.0, 10.0, 10.0))
    assert HISTOGRAM.since(before).counts == (0.0, 20.0, 30.0, 31.0)
    assert HISTOGRAM.since(None) == HISTOGRAM


def test_a_real_page_is_read_and_agrees_with_a_client_that_saw_the_same() -> None:
    before = ServerView.parse(exposition([9.0], [9.0]))
    after = ServerView.parse(exposition([9.0, 0.12, 0.13], [9.0, 0.02, 0.03]))
    rows = compare_views(before, after, [result(0.121, [0.021]), result(0.131, [0.031])])
    assert [row.name for row in rows] == [f"{k} p{p}" for k in ("TTFT", "ITL") for p in (50, 90, 99)] + [
        "output tokens"
    ]
    assert all(row.agrees for row in rows)
    assert (rows[0].low, rows[0].high) == (0.1, 0.15)
    assert (rows[-1].client, rows[-1].server) == (4.0, 4.0)


def test_a_client_that_saw_something_else_does_not_agree() -> None:
    before, after = ServerView.parse(exposition([], [])), ServerView.parse(exposition([0.12], [0.02]))
    rows = {row.name: row for row in compare_views(before, after, [result(0.5, [0.02, 0.02])])}
    assert not rows["TTFT p50"].agrees
    assert rows["ITL p50"].agrees
    assert not rows["output tokens"].agrees


def test_the_clients_own_delay_is_no_concern_of_the_server() -> None:
    before, after = ServerView.parse(exposition([], [])), ServerView.parse(exposition([0.12], []))
    rows = compare_views(before, after, [result(5.12, [], late_s=5.0)])
    assert all(row.agrees for row in rows)


def test_tokens_are_not_compared_when_somebody_hung_up() -> None:
    before, after = ServerView.parse(exposition([], [])), ServerView.parse(exposition([0.12], []))
    assert "output tokens" not in [row.name for row in compare_views(before, after, [result(0.12, [], cancelled=True)])]


def test_other_servers_have_no_view() -> None:
    with pytest.raises(ValueError, match="lacks"):
        ServerView.parse("# TYPE vllm:x counter\nvllm:x_total 1\n")
    assert ServerView.read("http://127.0.0.1:9") is None
    assert compare_views(None, None, []) == []


def test_agreement_is_the_buckets_width() -> None:
    assert Comparison("x", 0.17, 0.13, 0.1, 0.15).agrees
    assert not Comparison("x", 0.19, 0.13, 0.1, 0.15).agrees
    assert Comparison("x", 300.0, 160.0, 160.0, float("inf")).agrees
    assert Comparison("x", 300.0, 160.0, 160.0, float("inf")).as_dict()["bucket"] == [160.0, None]
