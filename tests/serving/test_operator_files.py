"""A real server whose keys file, config file and ledger break while it runs, in an environment that
names a proxy."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from serve_app.tenants.key_file import add_key, remove_key
from tests.serving.conftest import Server, wait_for
from tests.serving.keyed import Keyed, keyed

__all__ = ["keyed"]

pytestmark = pytest.mark.cluster

# Where nothing listens: whatever goes there fails.
NOWHERE = "http://127.0.0.1:9"
ENVIRONMENT = {name: NOWHERE for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "HTTP_PROXY")}
BROKEN = {
    "not UTF-8": b"\xff\xfe",
    "UTF-16": "applications: []".encode("utf-16"),
    "Latin-1": "# caf\xe9\n".encode("latin-1"),
    "deep": b"[" * 5000,
    "a date": b"applications: 2026-13-45",
    "a number": b"applications: " + b"9" * 5000,
    "a NUL": b"a\0b",
    "no application": b"applications: []",
    "a long name": b"applications:\n- {name: serve_app, import_path: 'serve_app.app:build', args: {model: /%b}}"
    % (b"x" * 300),
}


def count(server: Server, part: str) -> int:
    return sum(part in line for line in server.lines)


def status(keyed: Keyed, path: str, name: str | None = None) -> int:
    """0 while nothing answers."""
    with suppress(httpx.HTTPError):
        return keyed.get(path, name).status_code
    return 0


def test_a_proxy_of_the_environment_gets_no_request_to_this_machine(keyed: Keyed) -> None:
    assert keyed.complete("a").status_code == 200
    assert "curl --noproxy '*' " in keyed.server.line_with("  curl ")


def test_a_date_that_does_not_exist_keeps_no_key_in_force(keyed: Keyed) -> None:
    assert [keyed.complete(name).status_code for name in ("a", "b")] == [200, 200]
    good = keyed.file.read_text()
    keyed.file.write_text(f"{good}\nnew:\n  sha256: {'0' * 64}\n  expires: 2027-02-30\n")
    keyed.server.said("the last valid keys stay in force")
    assert "serve_app_keys_file_invalid 1.0" in keyed.get("/metrics", "admin").text
    assert keyed.complete("b").status_code == 200
    keyed.file.write_text(good)
    remove_key(keyed.file, "b")
    mended = time.monotonic()
    wait_for(lambda: keyed.complete("b").status_code == 401, "the end of the key")
    print(f"revoked {time.monotonic() - mended:.2f} s after the file was mended")
    assert "serve_app_keys_file_invalid 0.0" in keyed.get("/metrics", "admin").text
    assert keyed.complete("a").status_code == 200


def test_no_config_file_ends_the_server(keyed: Keyed) -> None:
    config = Path(keyed.server.process.args[-1])  # type: ignore[index, arg-type]
    good = config.read_bytes()
    renamed = good.replace(b"name: serve_app\n", b"name: another\n")
    assert renamed != good
    for content in (*BROKEN.values(), renamed):
        before = count(keyed.server, "nothing has changed")
        config.write_bytes(content)
        keyed.server.send(signal.SIGUSR1)
        wait_for(lambda before=before: count(keyed.server, "nothing has changed") > before, "the refusal")  # type: ignore[misc]
    assert count(keyed.server, "at least one running application must remain (serve_app); nothing has changed") == 1
    config.write_bytes(good)
    assert keyed.complete("a").status_code == 200
    # A controller that is away is Ray's to bring back; whatever becomes of the update, the server
    # serves.
    (controller,) = keyed.server.running("ServeController")
    controller.kill()
    keyed.server.send(signal.SIGUSR1)
    wait_for(lambda: count(keyed.server, "the update failed") + count(keyed.server, "] deployed") > 0, "an answer", 120)
    assert keyed.complete("a").status_code == 200
    assert keyed.server.process.poll() is None


def test_the_days_use_outlives_the_ledgers_file(keyed: Keyed) -> None:
    before = keyed.get("/v1/usage", "a").json()["today"]
    assert before["requests"] > 0
    (file,) = keyed.ledger.glob("usage-*.jsonl")
    os.remove(file)
    keyed.server.said("was removed, replaced or truncated")
    wait_for(lambda: sum(line.get("requests", 1) for line in keyed.lines("a")) == before["requests"], "the sums")
    assert keyed.complete("a").status_code == 200
    assert keyed.get("/v1/usage", "a").json()["today"]["requests"] == before["requests"] + 1


def test_the_days_use_outlives_a_pipe_in_the_ledgers_place(keyed: Keyed) -> None:
    before = keyed.get("/v1/usage", "a").json()["today"]["requests"]
    (file,) = keyed.ledger.glob("usage-*.jsonl")
    file.unlink()
    os.mkfifo(file)
    keyed.server.said("today's ledger file cannot be used")
    assert "serve_app_ledger_unusable 1.0" in keyed.get("/metrics", "admin").text
    assert keyed.complete("a").status_code == 200
    assert keyed.get("/v1/usage", "a").json()["today"]["requests"] == before + 1
    assert status(keyed, "/health/ready") == 200
    file.unlink()
    wait_for(lambda: "serve_app_ledger_unusable 0.0" in keyed.get("/metrics", "admin").text, "the file")
    assert sum(line.get("requests", 1) for line in keyed.lines("a")) == before + 1


def test_an_ingress_that_starts_with_a_broken_keys_file_lets_nobody_in_until_it_is_mended(keyed: Keyed) -> None:
    good = keyed.file.read_text()
    keyed.file.write_text("a: [")
    (ingress,) = keyed.server.running("ray::ServeReplica:serve_app:Ingress")
    ingress.kill()
    psutil.wait_procs([ingress], timeout=30)
    wait_for(lambda: status(keyed, "/health/live") == 200, "the next ingress", timeout_s=90)
    wait_for(lambda: status(keyed, "/v1/models", "a") == 503, "its answer")
    error = keyed.get("/v1/models", "a").json()["error"]
    assert error["code"] == "keys_file_invalid"
    assert "`ingress.keys_file`" in error["message"]
    assert status(keyed, "/health/ready") == 503
    assert status(keyed, "/v1/models") == 401
    keyed.file.write_text(good)
    wait_for(lambda: status(keyed, "/v1/models", "a") == 200, "the keys")
    assert status(keyed, "/health/ready") == 200
    assert keyed.get("/v1/usage", "a").json()["today"]["requests"] > 0
    add_key(keyed.file, "last", {})
    assert keyed.server.stop() == (0, [])
