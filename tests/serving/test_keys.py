"""A real server with a keys file: who comes in, what changes while it runs, and where no key may
ever stand."""

import json
import re
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest

from serve_app.tenants.key_file import remove_key
from tests.serving.conftest import wait_for
from tests.serving.keyed import Keyed, keyed
from tests.serving.leaks import RAY_TOKEN, internal_key_file, keys_of_replicas, shown_by

__all__ = ["keyed"]

pytestmark = pytest.mark.cluster

PUBLIC = {"/health/live", "/health/ready"}
HIDDEN = ["/openapi.json", "/no/such/route", "/v1/models/tiny"]
STATIC = ["/", "/docs", "/console/console.js"]
KINDS = ("prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")


def test_every_route_wants_a_key(keyed: Keyed) -> None:
    """The running server lists its routes, so that a new one is asked too."""
    paths = keyed.get("/openapi.json", "a").json()["paths"]
    assert {"/v1/chat/completions", "/metrics", "/metrics/targets", "/debug/replicas", "/debug/timeline"} <= set(paths)
    routes = [(method, path) for path, methods in paths.items() for method in methods]
    for method, path in [*routes, *(("get", path) for path in [*HIDDEN, *STATIC])]:
        url = keyed.server.url + re.sub(r"\{.*?\}", "x", path)
        for name in (None, "nobody", "a".upper() + keyed.keys["a"][1:].lower()):
            answer = httpx.request(method, url, headers=keyed.headers(name), timeout=60)
            wanted = 200 if path in PUBLIC or path in STATIC else 401
            assert answer.status_code == wanted, (method, path)
            if wanted != 200:
                error = answer.json()["error"]
                assert ("authentication_error" if "messages" in path else "invalid_api_key") in error.values()


def test_metrics_and_debug_want_an_admins_key(keyed: Keyed) -> None:
    for path in ("/metrics", "/metrics/targets", "/debug/replicas", "/debug/timeline"):
        assert [keyed.get(path, name).status_code for name in ("a", "admin")] == [403, 200]
    keyed.server.said('"admin_key":"admin","path":"/debug/timeline"')
    used = [json.loads(line) for line in keyed.server.lines if '"admin_key":' in line]
    assert ("admin", "/debug/replicas") in [(line["admin_key"], line["path"]) for line in used]
    assert {line["admin_key"] for line in used} == {"admin"}


def test_every_process_shows_its_metrics_to_admins_alone(keyed: Keyed) -> None:
    targets = keyed.get("/metrics/targets", "admin").json()
    assert sorted(one["labels"]["deployment"] for one in targets) == ["EngineReplica", "Ingress"]
    for one in targets:
        for path in ("/metrics", "/steps?seconds=9"):
            url = f"http://{one['targets'][0]}{path}"
            answers = [httpx.get(url, headers=keyed.headers(name)).status_code for name in (None, "a", "admin")]
            assert answers == [401, 401, 200], url
    assert re.search(r"serve_app_scrape_up\{.*\} 1\.0", keyed.get("/metrics", "admin").text)
    assert keyed.get("/debug/timeline", "admin").json()["replicas"]


def test_a_name_that_was_made_to_lead_here_is_not_answered(keyed: Keyed) -> None:
    for name, wanted in (("localhost", 200), ("evil.example", 403)):
        headers = keyed.headers("a") | {"host": name}
        assert httpx.get(f"{keyed.server.url}/v1/models", headers=headers).status_code == wanted


def test_one_tenants_prompts_are_not_found_by_another(keyed: Keyed) -> None:
    def cached(name: str) -> int:
        return int(keyed.complete(name).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached("a") > 0, cached("a") > 0, cached("b") > 0] == [False, True, False]
    assert [cached("c") > 0, cached("d") > 0] == [False, True]


def test_keys_change_while_streams_run(keyed: Keyed) -> None:
    keyed.add("brief")
    wait_for(lambda: keyed.complete("brief").status_code == 200, "the new key")
    headers, body = keyed.headers("brief"), {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{keyed.server.url}/v1/completions", json=body, headers=headers, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        remove_key(keyed.file, "brief")
        wait_for(lambda: keyed.complete("brief").status_code == 401, "the end of the key")
        assert "data: [DONE]" in list(lines)
    good = keyed.file.read_text()
    keyed.file.write_text("a: [")
    keyed.server.said("the last valid keys stay in force")
    assert keyed.complete("a").status_code == 200
    keyed.file.write_text(good)


def test_two_hundred_cancelled_streams_give_everything_back(keyed: Keyed) -> None:
    """Half of them at their first event, half as soon as they are sent. All could not be reserved
    at one time."""
    keyed.add("hasty", max_sequences=60, tokens_per_minute=300_000, tokens_per_day=300_000)
    wait_for(lambda: keyed.get("/v1/usage", "hasty").status_code == 200, "the new key")
    body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    address = httpx.URL(keyed.server.url)
    head = "".join(f"{name}: {value}\r\n" for name, value in keyed.headers("hasty").items())
    data = json.dumps(body)
    request = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{head}"
    request += f"Content-Length: {len(data)}\r\n\r\n{data}"

    def ask(number: int) -> str:
        with socket.create_connection((address.host, address.port or 0), timeout=60) as connection:
            connection.sendall(request.encode())
            return connection.recv(16).decode() if number % 2 else ""

    def is_settled() -> bool:
        usage, lines = keyed.get("/v1/usage", "hasty").json(), keyed.lines("hasty")
        today, sums = usage["today"], {kind: sum(line[kind] for line in lines) for kind in KINDS}
        return usage["sequences"] == today["reserved_tokens"] == 0 and today == today | sums | {"requests": len(lines)}

    def is_idle() -> bool:
        page = keyed.get("/metrics", "admin").text
        names = ("ingress_requests_ongoing", "ingress_queue_depth", "requests_running", "kv_blocks_used")
        return all(set(re.findall(rf"(?m)^serve_app_{name}(?:{{.*}})? (\S+)$", page)) == {"0.0"} for name in names)

    answers: list[str] = []
    with ThreadPoolExecutor(max_workers=20) as pool:
        for _ in range(10):
            answers += pool.map(ask, range(20))
            wait_for(is_settled, "the end of all sequences, each token of them in the ledger")
    assert set(answers) == {"", "HTTP/1.1 200 OK\r"}
    assert len(keyed.lines("hasty")) >= 100
    wait_for(is_idle, "slots and blocks are free")


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])])
def test_the_ledger_is_what_usage_said_whatever_is_killed(keyed: Keyed, kills: int) -> None:
    """Replicas die under streams, which go on elsewhere; so does the ingress, whose streams end
    with it."""
    name = f"billed-{kills}"
    keyed.add(name, tokens_per_day=1_000_000)
    wait_for(lambda: keyed.get("/v1/usage", name).status_code == 200, "the new key")
    told: dict[str, dict[str, Any]] = {}
    begun = threading.Semaphore(0)

    def ask(number: int) -> None:
        body = {"prompt": str(number), "max_tokens": 400 + number, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        url, headers = f"{keyed.server.url}/v1/completions", keyed.headers(name)
        with httpx.stream("POST", url, json=body, headers=headers, timeout=150) as answer:
            lines = (line for line in answer.iter_lines() if line)
            first = next(lines)
            begun.release()
            *_, usage, done = [first, *lines]
        assert done == "data: [DONE]"
        told[answer.headers["x-request-id"]] = json.loads(usage.removeprefix("data: "))["usage"]

    def kill(process: str, pool: ThreadPoolExecutor, first: int) -> list[Future[None]]:
        asked = [pool.submit(ask, number) for number in range(first, first + 4)]
        assert all(begun.acquire(timeout=120) for _ in asked)
        victims = keyed.server.running(process)
        assert victims
        for victim in victims:
            victim.kill()
        assert psutil.wait_procs(victims, timeout=60)[1] == []
        return asked

    with ThreadPoolExecutor(max_workers=4) as pool:
        for first in range(0, 4 * kills, 4):
            for one in kill("EngineReplica", pool, first):
                one.result()
        cut = kill("ray::ServeReplica:serve_app:Ingress", pool, 4 * kills)
        assert all(isinstance(one.exception(), httpx.TransportError | None) for one in cut)

    def is_back() -> bool:
        with suppress(httpx.HTTPError):
            return keyed.get("/v1/usage", name).status_code == 200
        return False

    wait_for(is_back, "another ingress", timeout_s=120)
    assert len(told) >= 4 * kills
    lines = {line["request_id"]: line for line in keyed.lines(name)}
    # The last words of a request may have died with the ingress, after its line was written.
    assert set(told) <= set(lines)
    assert len(lines) <= 4 * kills + 4
    for request_id, usage in told.items():
        line = lines[request_id]
        assert (line["prompt_tokens"], line["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    today = keyed.get("/v1/usage", name).json()["today"]
    assert today["requests"] == len(lines)
    for kind in KINDS:
        assert today[kind] == sum(line[kind] for line in lines.values())
    assert not any(secret in path.read_text() for path in keyed.ledger.iterdir() for secret in keyed.keys.values())


def test_no_key_is_anywhere(keyed: Keyed) -> None:
    """Runs last: whatever the tests before have made the server write is searched."""
    wait_for(lambda: keyed.complete("admin").status_code == 200, "the keys")
    internal = internal_key_file(keyed.server)
    files = [file for file in (internal, RAY_TOKEN) if file.exists()]
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)
    of_replicas = keys_of_replicas(keyed.server)
    assert len(of_replicas) == 2
    secrets = [*keyed.keys.values(), *(file.read_text() for file in files), *of_replicas]
    assert all(len(secret) >= 32 for secret in secrets)
    paths = ("/metrics", "/metrics/targets", "/debug/replicas", "/debug/timeline", "/openapi.json", "/v1/usage")
    pages = [keyed.get(path, "admin") for path in paths] + [keyed.complete("A" + keyed.keys["a"])]
    assert [page.status_code for page in pages] == [200] * len(paths) + [401]
    for text in [*shown_by(keyed.server), *(f"{page.headers}\n{page.text}" for page in pages)]:
        assert not any(secret in text for secret in secrets)
