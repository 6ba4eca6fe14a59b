"""A real server whose keys file, config file and ledger break while it runs, in an environment that names a proxy."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from serve_app.launch.ports import free_port
from serve_app.tenants.key_file import add_key, remove_key
from tests.serving.conftest import Server, launch, wait_for, write_config
from tests.serving.test_keys import Keyed

pytestmark = pytest.mark.cluster

# Where nothing listens: whatever goes there fails.
NOWHERE = "http://127.0.0.1:9"
PROXIES = {name: NOWHERE for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "HTTP_PROXY")}
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


@pytest.fixture(scope="module")
def keyed(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("operated")
    args = {
        "model": str(tiny_folder),
        "served_model_name": "tiny",
        "device": "cpu",
        "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_gib": 0.05, "num_threads": 1},
        "ingress": {"keys_file": str(folder / "keys.yaml"), "ledger_folder": str(folder / "ledger")},
    }
    keys: dict[str, str] = {}
    built = Keyed(None, folder / "keys.yaml", keys, folder / "ledger")  # type: ignore[arg-type]
    for name in ("a", "revoked"):
        built.add(name)
    built.add("admin", admin=True)
    port = free_port()
    built.server = Server(launch(write_config(folder, args, port), PROXIES), f"http://127.0.0.1:{port}")
    try:
        built.server.wait_ready()
        yield built
    finally:
        if built.server.process.poll() is None:
            built.server.stop()


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
    assert [keyed.complete(name).status_code for name in ("a", "revoked")] == [200, 200]
    good = keyed.file.read_text()
    keyed.file.write_text(f"{good}\nnew:\n  sha256: {'0' * 64}\n  expires: 2027-02-30\n")
    keyed.said("the last valid keys stay in force")
    assert "serve_app_keys_file_invalid 1.0" in keyed.get("/metrics", "admin").text
    assert keyed.complete("revoked").status_code == 200
    keyed.file.write_text(good)
    remove_key(keyed.file, "revoked")
    mended = time.monotonic()
    wait_for(lambda: keyed.complete("revoked").status_code == 401, "the end of the key")
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
    # A controller that is away is Ray's to bring back; whatever becomes of the update, the server serves.
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
    keyed.said("was removed, replaced or truncated")
    wait_for(lambda: sum(line.get("requests", 1) for line in keyed.lines("a")) == before["requests"], "the sums")
    assert keyed.complete("a").status_code == 200
    assert keyed.get("/v1/usage", "a").json()["today"]["requests"] == before["requests"] + 1


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
