"""Random arrivals keep their rate and their variation; traces are read in both layouts, and nothing
else is."""

from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, stdev

import pytest

from serve_app.workloads.arrivals import Arrival, random_arrivals, read_trace

BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
80,GPT-4,417,0,417,API log
118,GPT-4,417,276,693,Conversation log
"""
WITH_SESSIONS = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,a,1,ChatGPT,472,18,490,Conversation log
45,a,2,ChatGPT,1087,230,1317,Conversation log
118,b,3,GPT-4,417,276,693,Conversation log
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,472,18
2023-11-16 18:17:43.9799600,1087,230
2023-11-16 18:18:56.9799600,417,276
"""
AZURE_WITH_ZONE = AZURE.replace("9600,", "96+00:00,")
EXPECTED = [Arrival(0.0, 472, 18), Arrival(40.0, 1087, 230), Arrival(113.0, 417, 276)]


@pytest.mark.parametrize("variation", [0.5, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_variation(variation: float) -> None:
    times = [arrival.at_s for arrival in random_arrivals(Random(1), 50.0, 2000.0, variation)]
    gaps = [after - before for before, after in pairwise(times)]
    assert all(gap >= 0 for gap in gaps)
    assert times[-1] <= 2000.0
    assert 1 / mean(gaps) == pytest.approx(50.0, rel=0.08)
    assert stdev(gaps) / mean(gaps) == pytest.approx(variation, rel=0.1)


@pytest.mark.parametrize("text", [BURSTGPT, WITH_SESSIONS, AZURE, AZURE_WITH_ZONE], ids=str.split)
def test_traces(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    assert read_trace(tmp_path / "trace.csv") == EXPECTED


def test_speed_and_limit(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(BURSTGPT)
    fast = read_trace(tmp_path / "trace.csv", speed=10.0, limit=2)
    assert [arrival.at_s for arrival in fast] == [0.0, 4.0]


def test_rows_out_of_order_are_sorted(tmp_path: Path) -> None:
    lines = BURSTGPT.splitlines()
    (tmp_path / "trace.csv").write_text("\n".join([lines[0], *reversed(lines[1:])]))
    assert read_trace(tmp_path / "trace.csv") == EXPECTED


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "header"),
        ("", "header"),
        (BURSTGPT + "x,ChatGPT,1,1,2,log\n", "line 6"),
        (BURSTGPT + "200,ChatGPT\n", "line 6"),
        (AZURE + "2023-13-16 18:18:56,1,1\n", "line 5"),
    ],
)
def test_what_is_no_trace_is_said(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(tmp_path / "trace.csv")


def test_lengths_are_cut_to_what_a_server_takes() -> None:
    assert Arrival(1.0, 1000, 500).clipped(256, 64) == Arrival(1.0, 256, 64)
    assert Arrival(1.0, 10, 5).clipped(256, 64) == Arrival(1.0, 10, 5)
