"""A real Prometheus on our configuration watches a real fleet of three: what it knows is what the
clients measured."""

import asyncio
import contextlib
import itertools
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from load_tests.bench.server_view import Comparison
from load_tests.chaos.fleet import Fleet
from load_tests.chaos.traffic import MODEL
from serve_app.observability.metrics import _LATENCY_BUCKETS
from serve_app.workloads import client
from serve_app.workloads.client import RequestResult
from serve_app.workloads.figures import percentile
from serve_app.workloads.mixes import WorkItem
from tests.fleets import change
from tests.observability.prometheus import (
    ONLY_ON_GPUS,
    ONLY_WITH_KEYS,
    SCRAPE_INTERVAL_S,
    Prometheus,
    defined_series,
    find,
    metric_names,
    running_prometheus,
)
from tests.observability.test_grafana import queries
from tests.serving.conftest import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.parametrize("fleet", ["fast"], indirect=True)]

REPLICAS, SLOTS = 3, 2
OUTPUT_TOKENS = 160
# What differs between two looks at a server that has nothing to do.
RESTLESS = {"serve_app_engine_busy_ratio", "serve_app_ingress_tasks"}
INGRESS_TTFT = 'serve_app_time_to_first_token_seconds{}{{where="ingress"}}'


@dataclass
class Watched:
    """A fleet, and the Prometheus that scrapes it."""

    fleet: Fleet
    prometheus: Prometheus
    http: httpx.Client

    def replicas(self) -> list[dict[str, Any]]:
        """The replicas that are well."""
        listed = self.http.get("/debug/replicas").json()
        return [one for one in listed if one["condition"] == "ok" and not one["leaving"]]

    def names(self) -> set[str]:
        """Their names."""
        return {str(one["id"]) for one in self.replicas()}

    def busiest(self) -> dict[str, Any]:
        """The one with the most requests."""
        return max(self.replicas(), key=lambda one: one["in_flight"])


@pytest.fixture(scope="module")
def watched(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    find("prometheus")
    change(fleet, "EngineReplica", user_config={"max_num_seqs": SLOTS})
    with (
        running_prometheus(tmp_path_factory.mktemp("watched"), fleet.url) as prometheus,
        httpx.Client(base_url=fleet.url, timeout=30) as http,
    ):
        watched = Watched(fleet, prometheus, http)
        wait_for(lambda: len(prometheus.targets()) == REPLICAS + 1, "all processes are scraped", timeout_s=60)
        for replica in watched.replicas():
            # Where cores are few, the clients would read late what the ingress has sent in time.
            psutil.Process(replica["pid"]).nice(19)
        # One that is refused, so that there are refusals to be seen.
        late = {"model": MODEL, "prompt": "too late", "max_tokens": 9}
        http.post("/v1/completions", json=late, headers={"x-request-timeout": "0.000001"})
        yield watched
    change(fleet, "EngineReplica", user_config={"max_num_seqs": fleet.shape.slots})


@asynccontextmanager
async def load(fleet: Fleet, clients: int, turns: int | None = None) -> AsyncIterator[list[RequestResult]]:
    """Clients without a pause, for so many requests each or until the end; the results are complete
    after it."""
    target = client.Server(fleet.url, MODEL)
    results: list[RequestResult] = []
    stopped = asyncio.Event()

    async def work(number: int) -> None:
        for turn in itertools.count() if turns is None else range(turns):
            if turns is None and stopped.is_set():
                return
            prompt = f"Story {number % 4} begins like this, {'long ' * (number % 3)}{turn}: "
            item = WorkItem(prompt, len(prompt), OUTPUT_TOKENS)
            results.append(await client.send(session, target, item, len))

    async with client.open_session(target) as session, asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(work(number))
        try:
            yield results
        finally:
            stopped.set()


@asynccontextmanager
async def ever_new_grammars(fleet: Fleet) -> AsyncIterator[None]:
    """One client whose requests each have a grammar that is to be built."""

    async def work() -> None:
        async with httpx.AsyncClient(base_url=fleet.url, timeout=30) as http:
            for length in itertools.count(1):
                grammar = {"regex": f"[a-z]{{{length}}}"}
                body = {"model": MODEL, "prompt": "Say: ", "max_tokens": 4, "structured_outputs": grammar}
                answer = await http.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text

    task = asyncio.create_task(work())
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def at_ingress(results: list[RequestResult]) -> dict[str, float]:
    """What the ingress must have counted when clients got these."""
    requests, output = len(results), sum(result.output_tokens for result in results)
    return {
        'sum(serve_app_requests_total{endpoint="completions",outcome="completed"})': requests,
        "sum(serve_app_request_seconds_count)": requests,
        "sum(serve_app_queue_wait_seconds_count)": requests,
        INGRESS_TTFT.format("_count"): requests,
        "serve_app_prompt_tokens_total": sum(result.prompt_tokens or 0 for result in results),
        "serve_app_output_tokens_total": output,
        "serve_app_inter_token_latency_seconds_count": output - requests,
    }


def in_engines(results: list[RequestResult]) -> dict[str, float]:
    """What the engines must have counted, if none of them was lost."""
    prompt = sum(result.prompt_tokens or 0 for result in results)
    prefill = 'sum(serve_app_computed_tokens_total{phase="prefill"})'
    return {
        "sum(serve_app_sampled_tokens_total)": sum(result.output_tokens for result in results),
        'sum(serve_app_time_to_first_token_seconds_count{where="engine"})': len(results),
        f"{prefill} + sum(serve_app_prefix_cache_hit_tokens_total)": prompt,
        "sum(serve_app_prefix_cache_query_tokens_total)": prompt,
        "sum(serve_app_batch_tokens_sum) - sum(serve_app_computed_tokens_total)": 0,
    }


def wait_counted(watched: Watched, before: dict[str, float], grown: dict[str, float]) -> None:
    """Wait until everything has been scraped; what is counted once too often never becomes
    right."""
    wanted = {expr: before[expr] + number for expr, number in grown.items()}

    def differing() -> dict[str, tuple[float, float]]:
        known = {expr: watched.prometheus.value(expr) for expr in wanted}
        return {expr: (known[expr], wanted[expr]) for expr in wanted if known[expr] != wanted[expr]}

    try:
        wait_for(lambda: not differing(), "all is counted")
    except AssertionError:
        pytest.fail(f"(known, wanted): {differing()}")


async def way_there_and_back(watched: Watched, results: list[RequestResult], number: int) -> float:
    """How long a request that waits for nothing takes at most in nine of ten cases, in seconds.

    Until `number` results are there. The clients' own requests meet the worse cases: they come
    together, when others have ended together.
    """
    times = []
    async with httpx.AsyncClient(base_url=watched.fleet.url, timeout=30) as http:
        while len(results) < number:
            start = time.monotonic()
            await http.get("/health/live")
            times.append(time.monotonic() - start)
            await asyncio.sleep(0.05)
    return percentile(times, 90) or 0.0


def agreeing(name: str, measured: float | None, known: float, way_s: float = 0.0) -> Comparison:
    """Client and Prometheus beside each other, with the bucket that Prometheus's figure lies in.

    `way_s`: by how much the client may be late, since the server's clock starts and stops with the
    server.
    """
    assert measured is not None
    bounds = (0.0, *_LATENCY_BUCKETS, math.inf)
    above = next(index for index, bound in enumerate(bounds) if bound >= known and index)
    return Comparison(name, measured - min(way_s, max(measured - known, 0.0)), known, bounds[above - 1], bounds[above])


def test_every_process_is_a_target_with_a_name(watched: Watched) -> None:
    found = {(one["deployment"], one["replica"], one["node"]) for one in watched.prometheus.targets().values()}
    engines = {replica for deployment, replica, _ in found if deployment == "EngineReplica"}
    assert engines == watched.names()
    assert [deployment for deployment, _, _ in sorted(found)] == ["EngineReplica"] * REPLICAS + ["Ingress"]
    assert {node for _, _, node in found} == {"127.0.0.1"}


async def test_counts_and_latencies_are_those_of_the_clients(watched: Watched) -> None:
    """Four clients for each slot, so that most wait equally long, and long beside the client's own
    delays."""
    prometheus = watched.prometheus
    wait_for(lambda: not same_page(watched), "Prometheus holds what the page shows")
    before = {expr: prometheus.value(expr) for expr in at_ingress([]) | in_engines([])}
    started = time.monotonic()
    clients, turns = 4 * REPLICAS * SLOTS, 4
    async with load(watched.fleet, clients, turns) as results:
        way_s = await way_there_and_back(watched, results, clients * turns)
    assert [result.error for result in results if result.error] == []
    wait_counted(watched, before, at_ingress(results) | in_engines(results))

    window = f"[{math.ceil(time.monotonic() - started) + 2 * SCRAPE_INTERVAL_S}s]"
    ttft = [result.ttft_s for result in results if result.ttft_s is not None]
    rows = [
        agreeing(
            f"{name} p{percent}",
            percentile(measured, percent),
            prometheus.value(f"histogram_quantile({percent / 100}, sum by (le) (increase({buckets}{window})))"),
            way_s,
        )
        for name, measured, buckets in (
            ("TTFT", ttft, INGRESS_TTFT.format("_bucket")),
            ("request", [result.e2e_s for result in results], "serve_app_request_seconds_bucket"),
        )
        for percent in (50, 90)
    ]
    # Tokens may come together, so the gaps that a client sees are not those between tokens; their
    # sum is.
    gaps = sum(sum(result.gaps_s) for result in results) / sum(result.output_tokens - 1 for result in results)
    itl = "serve_app_inter_token_latency_seconds"
    known = prometheus.value(f"increase({itl}_sum{window}) / increase({itl}_count{window})")
    rows.append(agreeing("ITL mean", gaps, known))
    print(f"way there and back: {way_s:.3f} s", *rows, sep="\n")
    assert [row for row in rows if not row.agrees] == []


async def test_under_load_every_query_of_every_panel_has_data(watched: Watched) -> None:
    missing = {(panel, expr) for panel, expr in queries() if not metric_names(expr) & (ONLY_ON_GPUS | ONLY_WITH_KEYS)}

    def all_have_data() -> bool:
        for panel, expr in sorted(missing):
            if any(not math.isnan(value) for value in watched.prometheus.query(expr).values()):
                missing.discard((panel, expr))
        return not missing

    async with load(watched.fleet, clients=REPLICAS * SLOTS), ever_new_grammars(watched.fleet):
        with contextlib.suppress(AssertionError):
            await asyncio.to_thread(wait_for, all_have_data, "every query has data")
    assert missing == set()


def test_every_defined_series_is_there(watched: Watched) -> None:
    assert defined_series() - watched.prometheus.names() == ONLY_ON_GPUS | ONLY_WITH_KEYS


def test_every_rule_can_be_evaluated(watched: Watched) -> None:
    rules = watched.prometheus.rules()
    assert len(rules) > 15
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    recorded = {rule["name"] for rule in rules if rule["type"] == "recording"}
    assert recorded <= watched.prometheus.names()


def same_page(watched: Watched) -> list[Any]:
    """What differs between the page for people and what Prometheus holds now: nothing, for a server
    that is idle."""
    page: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(watched.http.get("/metrics").text):
        for sample in family.samples:
            if sample.name.startswith("serve_app_") and sample.name not in RESTLESS | {"serve_app_scrape_up"}:
                page[sample.name, frozenset(sample.labels.items())] = sample.value
    held: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    doubled = []
    for labels, value in watched.prometheus.query('{__name__=~"serve_app_.+"}').items():
        left = dict(labels)
        name = left.pop("__name__")
        if left.pop("deployment") == "Ingress":
            left.pop("replica")
        for added in ("instance", "job", "node"):
            left.pop(added)
        key = name, frozenset(left.items())
        doubled += [key] if key in held else []
        if name not in RESTLESS:
            held[key] = value
    return doubled + sorted(page.items() ^ held.items(), key=str)


async def test_after_a_replica_died_nothing_is_stale_doubled_or_lost(watched: Watched) -> None:
    prometheus = watched.prometheus
    wait_for(lambda: not same_page(watched), "Prometheus holds what the page shows")
    before = {expr: prometheus.value(expr) for expr in at_ingress([])}
    async with load(watched.fleet, clients=2 * REPLICAS * SLOTS) as results:
        await asyncio.to_thread(wait_for, lambda: watched.busiest()["in_flight"] >= SLOTS, "a replica has work")
        victim = watched.busiest()
        dead = victim["id"]
        os.kill(victim["pid"], signal.SIGKILL)

        def is_replaced() -> bool:
            engines = {dict(labels)["replica"] for labels in prometheus.query("serve_app_requests_running")}
            return len(engines) == REPLICAS and engines == watched.names() and dead not in engines

        await asyncio.to_thread(wait_for, is_replaced, "its series have ended and a new replica's are there", 90)
    assert [result.error for result in results if result.error] == []
    wait_counted(watched, before, at_ingress(results))
    wait_for(lambda: not same_page(watched), "Prometheus holds what the page shows")
    assert prometheus.value("sum(increase(serve_app_failovers_total[2m]))") > 0
