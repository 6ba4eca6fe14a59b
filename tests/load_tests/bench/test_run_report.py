"""Reports hold what they say in one file, for every kind of run, the empty and the broken ones
too."""

import pytest

from load_tests.bench.run_plots import _binned, _in_flight, _token_times
from load_tests.bench.run_report import _verdict, _views, run_page
from load_tests.bench.server_view import Comparison
from serve_app.workloads.client import RequestResult, Run
from serve_app.workloads.figures import Objective, summarize
from serve_app.workloads.mixes import WorkItem, Workload
from serve_app.workloads.report import circumstances, page, table

ITEM = WorkItem("", 3, 3)
GOOD = RequestResult(ITEM, None, 0.5, 1.5, [0.5, 0.5], 3, 3, due_s=1.0)
SLOW = RequestResult(ITEM, None, 3.0, 4.0, [0.5, 0.5], 3, 3, due_s=2.0)
FAILED = RequestResult(ITEM, "HTTP 429 <script>alert(1)</script>", None, 0.1, due_s=3.0, status=429)


RUNS = {"all": (GOOD, SLOW, FAILED), "bad": (FAILED,), "none": (), "many": (GOOD,) * 3000}


@pytest.mark.parametrize("results", RUNS.values(), ids=RUNS)
def test_every_kind_of_run_has_a_page(results: tuple[RequestResult, ...]) -> None:
    run = Run(Workload("w", (ITEM,) * len(results), None), results, 6.0, 0.1)
    html = run_page("A & B", circumstances(server="x"), run, summarize(run), Objective())
    assert html.count("data:image/svg+xml;base64,") == 3
    assert "<script>" not in html
    assert "A &amp; B" in html
    assert len(html) < 2_000_000


def test_the_verdict_is_the_objectives() -> None:
    run = Run(Workload("w", (ITEM,) * 3, None), (GOOD, SLOW, FAILED), 6.0, 0.1)
    for wanted, text in ((0.3, "Met: 33.3%"), (0.4, "Missed: 33.3%")):
        objective = Objective(1.0, 1.0, wanted)
        assert text in _verdict(summarize(run, objective=objective), objective)


def test_disagreement_with_the_server_stands_out() -> None:
    html = _views([Comparison("TTFT p50", 0.5, 0.1, 0.05, 0.15), Comparison("ITL p50", 0.5, 0.45, 0.4, 0.6)])
    assert html.count("<td>NO</td>") == html.count("<td>yes</td>") == 1


def test_cells_are_escaped_and_rounded() -> None:
    assert table(["a"], [["<b>"], [1234.5678], [0.123456], [None]]).count("<td>") == 4
    for text in ("&lt;b&gt;", "1,235", "0.1235", "–"):
        assert text in table(["a"], [["<b>"], [1234.5678], [0.123456], [None]])
    assert page("t", "b").startswith("<!doctype html>")


def test_what_is_drawn_over_time() -> None:
    assert _in_flight([GOOD, SLOW]) == ([0.0, 1.0, 2.0, 2.5, 6.0], [0, 1, 2, 1, 0])
    assert _token_times(GOOD) == [(1.5, 1.0), (2.0, 1.0), (2.5, 1.0)]
    assert _token_times(FAILED) == []
    assert _binned([(0.0, 1.0), (0.4, 1.0), (0.6, 3.0), (1e9, 2.0)], 0.5)[:2] == [4.0, 6.0]
    assert _binned([(1e9, 2.0)], 0.5)[-1] == 4.0
