"""Three replicas of a tiny model behind the router: who gets what, before and after one dies."""

import asyncio
import os
import signal
from typing import Any

import httpx
import pytest

from load_tests.bench.routing import parse_counters, prefix_figures
from load_tests.chaos.fleet import Fleet
from load_tests.chaos.traffic import MODEL

pytestmark = [pytest.mark.cluster, pytest.mark.parametrize("fleet", ["fast", "default"], indirect=True)]

HITS, QUERIES = "serve_app_prefix_cache_hit_tokens_total", "serve_app_prefix_cache_query_tokens_total"


def replicas(fleet: Fleet) -> list[dict[str, Any]]:
    return [
        one
        for one in httpx.get(f"{fleet.url}/debug/replicas").json()
        if one["condition"] == "ok" and not one["leaving"]
    ]


def counters(fleet: Fleet) -> dict[str, dict[str, float]]:
    return parse_counters(httpx.get(f"{fleet.url}/metrics").text)


async def ask(http: httpx.AsyncClient, prompt: str, session: str | None = None) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body, headers={"x-session-id": session} if session else {})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def client(fleet: Fleet) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=fleet.url, timeout=60)


async def test_shared_prefixes_land_together_and_every_replica_has_work(fleet: Fleet) -> None:
    before = counters(fleet)
    async with client(fleet) as http:
        for turn in range(4):
            prompts = [f"{'abcdefghi'[i] * 300} and then {turn}" for i in range(9)]
            await asyncio.gather(*(ask(http, prompt) for prompt in prompts))
    figures = prefix_figures(before, counters(fleet))
    # Three turns of four find 300 of 313 tokens, in whole blocks. Placed at random they would find
    # less than half.
    assert figures["hit_rate"] > 0.6
    assert figures["busiest_share"] < 0.5


async def test_a_session_stays_at_its_replica(fleet: Fleet) -> None:
    before = counters(fleet)
    async with client(fleet) as http:
        for i in range(6):
            await ask(http, f"{'uvwxyz'[i]} nothing alike {i}", session="one")
    after = counters(fleet)
    assert sum(after[name][QUERIES] > before[name][QUERIES] for name in after) == 1


async def test_a_replica_that_was_killed_gets_nothing(fleet: Fleet) -> None:
    """Last in the file. Its prefix goes elsewhere at once, for everybody."""
    prompt = "the home of this prefix will die " * 10
    before = counters(fleet)
    async with client(fleet) as http:
        text = await ask(http, prompt)
        after = counters(fleet)
        (home,) = (name for name in after if after[name][QUERIES] > before[name][QUERIES])
        pid = next(one["pid"] for one in replicas(fleet) if one["id"] == home)
        os.kill(pid, signal.SIGKILL)
        assert [await ask(http, prompt) for _ in range(4)] == [text] * 4
        assert home not in [one["id"] for one in replicas(fleet)]
