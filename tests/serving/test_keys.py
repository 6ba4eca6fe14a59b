"""A real server with a keys file: who comes in, what changes while it runs, and where no key may ever stand."""

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from serve_app.settings import INTERNAL_KEY_FILE
from serve_app.tenants.key_file import add_key, remove_key
from serve_app.tenants.ledger import read_ledger
from tests.serving.conftest import Server, free_port, launch, wait_for, write_config

pytestmark = pytest.mark.cluster

PUBLIC = {"/health/live", "/health/ready"}
HIDDEN = ["/openapi.json", "/no/such/route", "/v1/models/tiny"]
STATIC = ["/", "/docs", "/console/console.js"]
PROMPT = "Once upon a time " * 40


@dataclass
class Keyed:
    server: Server
    file: Path
    keys: dict[str, str]
    ledger: Path

    def get(self, path: str, name: str | None = None) -> httpx.Response:
        return httpx.get(f"{self.server.url}{path}", headers=self.headers(name), timeout=60)

    def complete(self, name: str | None, **fields: Any) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **fields}
        return httpx.post(f"{self.server.url}/v1/completions", json=body, headers=self.headers(name), timeout=60)

    def headers(self, name: str | None) -> dict[str, str]:
        return {} if name is None else {"authorization": f"Bearer {self.keys.get(name, name)}"}

    def add(self, name: str, **fields: Any) -> None:
        self.keys[name] = add_key(self.file, name, fields)

    def said(self, text: str) -> None:
        wait_for(lambda: any(text in line for line in self.server.lines), text)


@pytest.fixture(scope="module")
def keyed(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("keyed")
    args = {
        "model": str(tiny_folder),
        "served_model_name": "tiny",
        "device": "cpu",
        "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_gib": 0.05, "num_threads": 1},
        "ingress": {
            "keys_file": str(folder / "keys.yaml"),
            "ledger_folder": str(folder / "ledger"),
            "failover_wait_s": 120.0,
        },
    }
    port = free_port()
    keys: dict[str, str] = {}
    built = Keyed(None, folder / "keys.yaml", keys, folder / "ledger")  # type: ignore[arg-type]
    for name, fields in (("a", {}), ("b", {}), ("c", {"prefix_group": "g"}), ("d", {"prefix_group": "g"})):
        built.add(name, **fields)
    built.add("admin", admin=True)
    built.server = Server(launch(write_config(folder, args, port), {}), f"http://127.0.0.1:{port}")
    try:
        built.server.wait_ready()
        yield built
    finally:
        if built.server.process.poll() is None:
            built.server.stop()


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
    (audit,) = keyed.ledger.glob("audit-*.jsonl")
    used = [json.loads(line) for line in audit.read_text().splitlines()]
    assert ("admin", "/debug/replicas") in [(line.get("key"), line.get("accessed")) for line in used]
    assert "a" not in [line.get("key") for line in used]


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
    keyed.said("the keys known before stay in force")
    assert keyed.complete("a").status_code == 200
    keyed.file.write_text(good)


def test_the_ledger_is_what_usage_said_whatever_is_killed(keyed: Keyed) -> None:
    """Replicas die under streams, which go on elsewhere; the ingress dies, and the day's sums outlive it."""
    keyed.add("billed", tokens_per_day=1_000_000)
    wait_for(lambda: keyed.get("/v1/usage", "billed").status_code == 200, "the new key")
    told: list[dict[str, Any]] = []
    begun = threading.Semaphore(0)

    def ask(number: int) -> None:
        body = {"prompt": str(number), "max_tokens": 400 + number, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        url, headers = f"{keyed.server.url}/v1/completions", keyed.headers("billed")
        with httpx.stream("POST", url, json=body, headers=headers, timeout=150) as answer:
            lines = (line for line in answer.iter_lines() if line)
            first = next(lines)
            begun.release()
            *_, usage, done = [first, *lines]
        assert done == "data: [DONE]"
        told.append(json.loads(usage.removeprefix("data: "))["usage"])

    with ThreadPoolExecutor(max_workers=4) as pool:
        for first in (0, 4):
            asked = [pool.submit(ask, number) for number in range(first, first + 4)]
            assert all(begun.acquire(timeout=120) for _ in asked)
            for replica in keyed.server.running("EngineReplica"):
                replica.kill()
            for one in asked:
                one.result()
    told_tokens = [sum(usage[name] for usage in told) for name in ("prompt_tokens", "completion_tokens")]
    (old,) = keyed.server.running("ray::ServeReplica:serve_app:Ingress")
    old.kill()
    old.wait(60)

    def is_back() -> bool:
        with suppress(httpx.HTTPError):
            return keyed.get("/v1/usage", "billed").status_code == 200
        return False

    wait_for(is_back, "another ingress", timeout_s=120)
    today = keyed.get("/v1/usage", "billed").json()["today"]
    assert (today["requests"], [today["prompt_tokens"], today["output_tokens"]]) == (8, told_tokens)
    lines = [entry for _, entry in read_ledger(keyed.ledger, date.min, date.max) if entry["key"] == "billed"]
    assert [sum(line[name] for line in lines) for name in ("prompt_tokens", "output_tokens")] == told_tokens
    assert not any(secret in path.read_text() for path in keyed.ledger.iterdir() for secret in keyed.keys.values())


def test_no_key_is_anywhere(keyed: Keyed) -> None:
    """Runs last: whatever the tests before have made the server write is searched."""
    wait_for(lambda: keyed.complete("admin").status_code == 200, "the keys")
    processes = [psutil.Process(keyed.server.process.pid), *keyed.server.descendants()]
    commands, internal = [], set()
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            commands.append(" ".join(process.cmdline()))
            internal.add(process.environ().get(INTERNAL_KEY_FILE, ""))
    (file,) = internal - {""}
    secrets = [*keyed.keys.values(), Path(file).read_text()]
    assert all(len(secret) > 40 for secret in secrets)
    assert Path(file).stat().st_mode & 0o077 == 0
    (session,) = {found for command in commands for found in re.findall(r"/tmp/ray/session_[\d_-]+", command)}
    logs = [path.read_text(errors="replace") for path in Path(session, "logs").rglob("*") if path.is_file()]
    paths = ("/metrics", "/metrics/targets", "/debug/replicas", "/debug/timeline", "/openapi.json")
    pages = [keyed.get(path, "admin") for path in paths] + [keyed.complete("A" + keyed.keys["a"])]
    assert [page.status_code for page in pages] == [200] * len(paths) + [401]
    for text in ["\n".join(keyed.server.lines), *commands, *logs, *(page.text for page in pages)]:
        assert not any(secret in text for secret in secrets)
