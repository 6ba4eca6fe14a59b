"""The keys file on disk: changed in one step, watched, and kept when it is broken."""

import logging
import os
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from serve_app.errors import AuthenticationError, ConfigError
from serve_app.tenants.key_file import WatchedKeyFile, add_key, read_key_file, remove_key
from serve_app.tenants.keys import KeyRing

NOW = datetime(2026, 11, 23, tzinfo=UTC)


def names(path: Path) -> list[str]:
    return [tenant.name for tenant in read_key_file(path).tenants]


def test_keys_are_added_and_removed_and_the_rest_of_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    keys = {name: add_key(path, name, {"weight": weight}) for weight, name in enumerate(("a", "ab", "c"), 1)}
    text = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert not any(key in text for key in keys.values())
    ring = read_key_file(path)
    assert {name: ring.find(key, NOW).weight for name, key in keys.items()} == {"a": 1, "ab": 2, "c": 3}
    path.write_text(text.replace("ab:", "# of the other team\nab:  # now\n"))
    path.chmod(0o640)
    remove_key(path, "a")
    assert (names(path), path.stat().st_mode & 0o777) == (["ab", "c"], 0o640)
    assert "# of the other team" in path.read_text()
    remove_key(path, "c")
    remove_key(path, "ab")
    assert names(path) == []
    again = add_key(path, "a", {})
    assert read_key_file(path).find(again, NOW).name == "a"
    with pytest.raises(AuthenticationError):
        read_key_file(path).find(keys["a"], NOW)
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.yaml"], "no temporary files stay"


def test_what_cannot_be_done_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    with pytest.raises(ConfigError, match=r"keys file .*keys.yaml: No such file"):
        read_key_file(path)
    with pytest.raises(ConfigError, match="No such file"):
        remove_key(path, "a")
    with pytest.raises(ConfigError, match="is not a valid name"):
        add_key(path, "a b", {})
    with pytest.raises(ConfigError, match="`weight`: Input should be less"):
        add_key(path, "a", {"weight": 10_000})
    assert not path.exists()
    with pytest.raises(ConfigError, match="too long"):
        add_key(tmp_path / ("x" * 300), "a", {})
    add_key(path, "a", {})
    before = path.read_text()
    with pytest.raises(ConfigError, match="a key named a exists"):
        add_key(path, "a", {})
    with pytest.raises(ConfigError, match="no key is named 'b'"):
        remove_key(path, "b")
    path.write_text("{a: {sha256: " + before.split("sha256: ")[1].strip() + "}}")
    with pytest.raises(ConfigError, match="by hand"):
        remove_key(path, "a")
    assert names(path) == ["a"]
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_key_file(path)


def test_a_watched_file_is_followed_and_a_broken_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "serve_app.tenants")
    path = tmp_path / "keys.yaml"
    first = add_key(path, "a", {})
    watched = WatchedKeyFile(path)
    ring = watched.ring
    watched.refresh()
    assert watched.ring is ring, "read once"
    second = add_key(path, "b", {})
    watched.refresh()
    assert watched.ring.find(second, NOW).name == "b"
    good = path.read_text()
    for broken in ("a: {sha256: " + first + "}", "", "a: ["):
        path.write_text(broken)
        watched.refresh()
        watched.refresh()
        assert watched.ring.find(first, NOW).name == "a"
    os.remove(path)
    watched.refresh()
    assert watched.ring.find(second, NOW).name == "b"
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 4, "each once"
    assert all("the last valid keys stay in force" in message for message in errors)
    path.write_text(good + "  weight: 7\n")
    watched.refresh()
    assert watched.ring.find(second, NOW).weight == 7
    remove_key(path, "a")
    watched.refresh()
    with pytest.raises(AuthenticationError):
        watched.ring.find(first, NOW)
    told = [record.getMessage().rpartition(": ")[2] for record in caplog.records if record.levelno == logging.INFO]
    assert told == ["added b", "changed b", "removed a"]
    assert not any(key in caplog.text for key in (first, second))


def test_an_invalid_file_is_parsed_once_and_read_as_soon_as_it_changes(tmp_path: Path) -> None:
    """Each request to the metrics port looks at it: 0.5 s of parsing for 4,000 keys would be the
    client's to order."""
    path, parsed = tmp_path / "keys.yaml", 0

    def check(ring: KeyRing) -> None:
        nonlocal parsed
        parsed += 1
        if any(tenant.name == "wrong" for tenant in ring.tenants):
            raise ConfigError("wrong is not allowed")

    key = add_key(path, "a", {})
    good = path.read_text()
    watched = WatchedKeyFile(path, check)
    add_key(path, "wrong", {})
    invalid, before = path.read_text(), parsed
    for _ in range(100):
        watched.refresh()
    assert parsed == before + 1
    path.unlink()
    watched.refresh()
    assert "No such file" in (watched.error or "")
    path.write_text(invalid)
    watched.refresh()
    assert "wrong is not allowed" in (watched.error or ""), "not the error in between"
    path.write_text(good.replace("a:", "b:"))
    watched.refresh()
    assert (watched.error, watched.ring.find(key, NOW).name) == (None, "b")


def test_several_threads_read_a_change_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "keys.yaml"
    both = threading.Barrier(2)

    def check(_: KeyRing) -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)

    path.write_text("a: [")
    watched = WatchedKeyFile(path, check, KeyRing({}))
    watched.refresh()
    path.unlink()
    add_key(path, "a", {})
    threads = [threading.Thread(target=watched.refresh) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert caplog.text.count("was reloaded: added a") == 1


def test_a_server_does_not_start_with_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("a: b")
    with pytest.raises(ConfigError, match="a: must be a mapping"):
        WatchedKeyFile(path)
