"""Who comes in while the files that say so are broken, and who sees a replica's metrics."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.errors import AuthenticationError, ConfigError, UnavailableError
from serve_app.serving import auth
from serve_app.serving.auth import Auth, admits_to_replicas_metrics, check_auth
from serve_app.settings import IngressSettings
from serve_app.system.lasting import LastingTasks
from serve_app.tenants.key_file import WatchedKeyFile, add_key, remove_key


def test_a_replica_without_the_keys_file_answers_the_ingress_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    admits = admits_to_replicas_metrics(IngressSettings(keys_file=str(path)), "own key")
    assert admits is not None
    assert [admits(key) for key in ("own key", "", "another")] == [True, False, False]
    admin, other = add_key(path, "admin", {"admin": True}), add_key(path, "other", {})
    assert [admits(key) for key in ("own key", admin, other)] == [True, True, False]
    remove_key(path, "admin")
    assert [admits(key) for key in ("own key", admin)] == [True, False]


def test_without_keys_everybody_sees_it() -> None:
    assert admits_to_replicas_metrics(IngressSettings(), "own key") is None


def scope(key: str, path: str = "/v1/models") -> dict[str, Any]:
    headers = [(b"authorization", f"Bearer {key}".encode()), (b"host", b"localhost")]
    return {"type": "http", "method": "GET", "path": path, "headers": headers}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (files have no event)
            await asyncio.sleep(0.01)


def is_refused(opened: Auth, key: str) -> bool:
    try:
        opened.access.tenant_of(scope(key))
    except AuthenticationError:
        return True
    return False


async def test_keys_are_revoked_after_whatever_stood_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(auth, "_REFRESH_S", 0.001)
    path = tmp_path / "keys.yaml"
    kept, revoked = add_key(path, "kept", {}), add_key(path, "revoked", {})
    opened, tasks = Auth(IngressSettings(keys_file=str(path)), "127.0.0.1"), LastingTasks()
    opened.start(tasks)
    good = path.read_text()
    for broken in (b"\xff\xfe", b"[" * 5000, good.encode() + b"\nx: {expires: 2027-02-30}", b"x: " + b"9" * 5000):
        path.write_bytes(broken)
        await until(lambda: opened.keys_file_invalid)
        opened.check_ready()
        assert not is_refused(opened, revoked)
        path.write_text(good)
        await until(lambda: not opened.keys_file_invalid)
    remove_key(path, "revoked")
    await until(lambda: is_refused(opened, revoked))
    assert opened.access.tenant_of(scope(kept)).name == "kept"
    assert tasks.errors == {}
    assert not any(key in caplog.text for key in (kept, revoked))


async def test_an_ingress_that_starts_with_broken_files_lets_nobody_in_until_they_are_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "_REFRESH_S", 0.001)
    path, folder = tmp_path / "keys.yaml", tmp_path / "ledger"
    key = add_key(path, "a", {"tokens_per_day": 5})
    good = path.read_text()
    path.write_text("a: [")
    folder.touch()
    ingress = IngressSettings(keys_file=str(path), ledger_folder=str(folder))
    with pytest.raises(ConfigError, match="is not YAML"):
        check_auth(ingress, "127.0.0.1")
    opened = Auth(ingress, "127.0.0.1")
    opened.start(LastingTasks())
    with pytest.raises(UnavailableError, match="`ingress.keys_file`"):
        opened.access.tenant_of(scope(key))
    with pytest.raises(UnavailableError, match="`ingress.keys_file`"):
        opened.check_ready()
    assert opened.access.tenant_of(scope(key, "/health/live")).name == ""
    path.write_text(good)
    await until(lambda: not opened.keys_file_invalid)
    assert opened.access.tenant_of(scope(key)).name == "a"
    with pytest.raises(UnavailableError, match="`ingress.ledger_folder`"):
        opened.check_ready()
    with pytest.raises(ConfigError, match="`ingress.ledger_folder`"):
        check_auth(ingress, "127.0.0.1")
    folder.unlink()
    await until(folder.is_dir)
    opened.check_ready()


def test_an_invalid_file_is_told_every_thirty_seconds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    path, now = tmp_path / "keys.yaml", [0.0]
    add_key(path, "a", {})
    watched = WatchedKeyFile(path, clock=lambda: now[0])
    path.write_text("a: [")
    for second in range(95):
        now[0] = second
        watched.refresh()
    assert len(caplog.records) == 4
