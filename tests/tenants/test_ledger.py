"""The ledger: nothing that was written is lost, whoever else writes, whatever a crash left
behind."""

import errno
import fcntl
import itertools
import logging
import multiprocessing
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.errors import ConfigError
from serve_app.tenants.day_file import MAX_LINE_BYTES, ledger_file
from serve_app.tenants.ledger import Ledger, Spent, read_ledger
from serve_app.tenants.totals import MAX_COUNT, Totals
from tests.examples import examples

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC).timestamp()
DAY = date(2026, 11, 23)
SPENT = Spent("team", "tiny", "fp", "req-1", "chat", "completed", 10, 4, 7, 5, 0.123456)


class Clock:
    now = NOON

    def __call__(self) -> float:
        return self.now


def lines(folder: Path, day: date = DAY) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in ledger_file(folder, day).read_bytes().splitlines()]


def test_a_request_is_one_line_and_counts_today(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "new" / "folder", Clock())
    ledger.write(SPENT)
    ledger.write(replace(SPENT, key="", output_tokens=1))
    ledger.sync()
    first, second = lines(tmp_path / "new" / "folder")
    assert first == {
        "time": "2026-11-23T12:00:00.000+00:00",
        "key": "team",
        "model": "tiny",
        "revision": "fp",
        "request_id": "req-1",
        "endpoint": "chat",
        "outcome": "completed",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 7,
        "reasoning_tokens": 5,
        "seconds": 0.1235,
    }
    assert (ledger.today("team"), ledger.today("team").tokens) == (Totals(1, 10, 4, 7, 5), 17)
    assert (ledger.today(""), ledger.today("nobody")) == (Totals(1, 10, 4, 1, 5), Totals())
    assert second["key"] == ""
    assert ledger_file(tmp_path / "new" / "folder", DAY).stat().st_mode & 0o777 == 0o600


def test_a_day_has_a_file_and_sums_of_its_own(tmp_path: Path) -> None:
    clock = Clock()
    ledger = Ledger(tmp_path, clock)
    ledger.write(SPENT)
    clock.now += 12 * 3600
    assert ledger.today("team") == Totals()
    ledger.write(SPENT)
    clock.now += 86_400
    ledger.write(replace(SPENT, key="other"))
    assert [len(lines(tmp_path, date(2026, 11, day))) for day in (23, 24, 25)] == [1, 1, 1]
    assert (ledger.today("team").requests, ledger.today("other").requests) == (0, 1)
    found = [(day.day, entry["key"]) for day, entry in read_ledger(tmp_path, date(2026, 11, 24), date(2026, 12, 1))]
    assert found == [(24, "team"), (25, "other")]


def test_a_restart_and_another_process_go_on_with_the_days_sums(tmp_path: Path) -> None:
    first = Ledger(tmp_path, Clock())
    first.write(SPENT)
    second = Ledger(tmp_path, Clock())
    assert second.today("team").requests == 1
    first.write(SPENT)
    second.write(SPENT)
    assert first.today("team") == second.today("team") == Totals(3, 30, 12, 21, 15)


def test_half_a_line_harms_no_other(tmp_path: Path) -> None:
    Ledger(tmp_path, Clock()).write(SPENT)
    with ledger_file(tmp_path, DAY).open("ab") as file:
        file.write(b'{"key":"team","prompt_to')
    (tmp_path / "usage-notes.jsonl").write_text("no day's")
    ledger = Ledger(tmp_path, Clock())
    ledger.write(SPENT)
    assert ledger.today("team").requests == 2
    assert len(list(read_ledger(tmp_path, DAY, DAY))) == 2


def test_lines_from_before_reasoning_was_told_count(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, Clock())
    ledger.write(SPENT)
    old = {name: value for name, value in lines(tmp_path)[0].items() if name != "reasoning_tokens"}
    with ledger_file(tmp_path, DAY).open("ab") as file:
        file.write(orjson.dumps(old) + b"\n")
    assert ledger.today("team") == Totals(2, 20, 8, 14, 5)


def write_for_ever(folder: Path, connection: Any) -> None:
    ledger = Ledger(folder)
    number = 0
    while True:
        number += 1
        ledger.write(replace(SPENT, request_id=str(number)))
        connection.send(number)


def test_no_line_is_lost_when_the_process_is_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=write_for_ever, args=(tmp_path, sender))
    process.start()
    sender.close()
    while receiver.recv() < 500:
        pass
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    last = 500
    try:
        while True:
            last = receiver.recv()
    except (EOFError, OSError):
        receiver.close()
    found = [entry["request_id"] for _, entry in read_ledger(tmp_path, date(2026, 1, 1), date(9999, 1, 1))]
    assert found == [str(number) for number in range(1, len(found) + 1)]
    assert last <= len(found) <= last + 1


def test_what_cannot_be_written_counts_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(tmp_path, Clock())
    ledger.write(SPENT)
    assert ledger.today("team").requests == 1
    assert ledger._file is not None
    writable, ledger._file._file = ledger._file._file, os.open(ledger_file(tmp_path, DAY), os.O_RDONLY)
    ledger.write(SPENT)
    ledger.write(SPENT)
    assert ledger.today("team").requests == 3, "limits hold without the file"
    os.close(ledger._file._file)
    ledger._file._file = writable
    ledger.write(SPENT)
    assert [(record.levelno, "cannot be written" in record.message) for record in caplog.records] == [
        (logging.ERROR, True)
    ]
    assert ledger.today("team").requests == 4
    assert len(list(read_ledger(tmp_path, DAY, DAY))) == 2


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"`ingress.ledger_folder`: .*file: "):
        Ledger(tmp_path / "file")


def replaced(path: Path) -> None:
    path.with_suffix(".new").write_bytes(b"")
    path.with_suffix(".new").rename(path)


LOSSES: dict[str, Callable[[Path], object]] = {
    "removed": os.remove,
    "moved": lambda path: path.rename(path.with_suffix(".old")),
    "truncated": lambda path: os.truncate(path, 0),
    "cut in the middle": lambda path: os.truncate(path, path.stat().st_size // 2 - 7),
    "replaced": replaced,
    "gone with its folder": lambda path: shutil.rmtree(path.parent),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_days_sums_outlive_their_file(tmp_path: Path, caplog: pytest.LogCaptureFixture, loss: str) -> None:
    folder = tmp_path / "ledger"
    ledger, another = Ledger(folder, Clock()), Ledger(folder, Clock())
    for _ in range(3):
        ledger.write(SPENT)
        another.write(replace(SPENT, key="other"))
    ledger.look()
    LOSSES[loss](ledger_file(folder, DAY))
    ledger.write(SPENT)
    expected = {"team": Totals(4, 40, 16, 28, 20), "other": Totals(3, 30, 12, 21, 15)}
    assert {key: ledger.today(key) for key in expected} == expected
    for _ in range(2):
        ledger.look()
        another.look()
    assert "removed, replaced or truncated" in caplog.text
    for one in (ledger, another, Ledger(folder, Clock())):
        assert {key: one.today(key) for key in expected} == expected
    ledger.write(SPENT)
    assert Ledger(folder, Clock()).today("team").requests == 5
    assert sum(entry.get("requests", 1) for _, entry in read_ledger(folder, DAY, DAY) if entry["key"] == "other") == 3


STEPS = st.sampled_from([*itertools.product(("write", "look"), range(3)), ("remove", 0), ("restart", 0)])


@settings(max_examples=examples(100))
@given(steps=st.lists(STEPS, max_size=25))
def test_no_use_is_lost_or_counted_twice_whoever_sees_a_loss_first(steps: list[tuple[str, int]]) -> None:
    """Several ingresses: each goes on writing to a file that was removed until it notices."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ledgers = [Ledger(folder, Clock()) for _ in range(3)]
        written = 0
        for step, number in steps:
            if step == "write":
                written += 1
                ledgers[number].write(SPENT)
                continue
            if step == "look":
                ledgers[number].look()
                continue
            for ledger in ledgers:  # as each does within a second
                ledger.look()
            if step == "remove":
                ledger_file(folder, DAY).unlink()
            else:
                ledgers[0].close()
                ledgers[0] = Ledger(folder, Clock())
        for ledger in ledgers:
            ledger.look()
        assert [ledger.today("team").requests for ledger in ledgers] == [written] * 3
        assert sum(entry.get("requests", 1) for _, entry in read_ledger(folder, DAY, DAY)) == written
        for ledger in ledgers:
            ledger.close()


def test_a_file_that_cannot_be_locked_costs_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network's file system without locks."""

    def fail(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    ledger = Ledger(tmp_path, Clock())
    ledger.write(SPENT)
    ledger_file(tmp_path, DAY).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", fail)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            ledger.look()
        assert len(os.listdir("/proc/self/fd")) == before
    ledger.look()
    assert Ledger(tmp_path, Clock()).today("team").requests == 1


def test_a_file_that_another_process_has_locked_is_not_waited_for(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, Clock())
    ledger.write(SPENT)
    os.truncate(ledger_file(tmp_path, DAY), 0)
    with ledger_file(tmp_path, DAY).open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        ledger.look()
        ledger.write(SPENT)
        assert ledger.today("team").requests == 2
    ledger.look()
    assert Ledger(tmp_path, Clock()).today("team").requests == ledger.today("team").requests == 2


def test_what_was_used_without_a_file_is_added_to_what_the_file_has(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"
    for _ in range(3):
        Ledger(folder, Clock()).write(SPENT)
    folder.rename(tmp_path / "away")
    folder.touch()
    ledger = Ledger(folder, Clock(), must_open=False)
    ledger.write(SPENT)
    folder.unlink()
    (tmp_path / "away").rename(folder)
    ledger.look()
    assert ledger.today("team").requests == Ledger(folder, Clock()).today("team").requests == 4


def test_what_could_not_be_written_is_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its folder is a file for a while, as on a disk that takes nothing."""
    folder, seconds = tmp_path / "ledger", [0.0]
    ledger = Ledger(folder, Clock(), lambda: seconds[0])
    ledger.write(SPENT)
    shutil.rmtree(folder)
    folder.touch()
    for _ in range(35):
        ledger.look()
        ledger.write(SPENT)
        seconds[0] += 1
    assert ledger.today("team").requests == 36
    reports = [record for record in caplog.records if "kept in memory" in record.getMessage()]
    assert len(reports) == 2, "once, and again after 30 s"
    folder.unlink()
    ledger.look()
    assert Ledger(folder, Clock()).today("team") == ledger.today("team") == Totals(36, 360, 144, 252, 180)


def test_a_disk_that_fails_is_told_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(tmp_path, Clock())
    ledger.write(SPENT)
    reader, writer = os.pipe()  # which no fsync is for
    assert ledger._file is not None
    real, ledger._file._file = ledger._file._file, writer
    ledger.sync()
    ledger._file._file = real
    ledger.sync()
    os.close(reader)
    os.close(writer)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "the ledger cannot be synced to disk"
    ]


def test_a_day_begins_at_zero_where_its_file_cannot_be_opened(tmp_path: Path) -> None:
    clock, folder = Clock(), tmp_path / "ledger"
    ledger = Ledger(folder, clock)
    ledger.write(SPENT)
    shutil.rmtree(folder)
    folder.touch()
    clock.now += 12 * 3600
    assert ledger.today("team") == Totals()
    ledger.write(SPENT)
    folder.unlink()
    ledger.look()
    assert ledger.today("team").requests == 1
    assert len(lines(folder, date(2026, 11, 24))) == 1


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 300 * 2**20)


OTHERS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/null"),
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "socket": socket_at,
    "sparse": sparse,
    "long line": lambda path: path.write_bytes(b"x" * 2 * MAX_LINE_BYTES),
    "empty lines": lambda path: path.write_bytes(b"\n" * 2 * MAX_LINE_BYTES),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_ledger_is_refused_at_start_and_outlived_by_the_sums(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    path = ledger_file(tmp_path, DAY)
    OTHERS[kind](path)
    for refused in (lambda: Ledger(tmp_path, Clock()), lambda: list(read_ledger(tmp_path, DAY, DAY))):
        with pytest.raises(ConfigError, match=re.escape(path.name)) as error:
            refused()
        wanted = r"is not a regular file|\(\d+ bytes\): no line of a ledger in 64 KiB from byte 0 on; .* 64 KiB"
        assert re.search(wanted, str(error.value))
    assert not Ledger(tmp_path, Clock(), must_open=False).is_open
    path.rmdir() if kind == "folder" else path.unlink()
    ledger, another = Ledger(tmp_path, Clock()), Ledger(tmp_path, Clock())
    ledger.write(SPENT)
    path.unlink()
    OTHERS[kind](path)
    caplog.clear()
    for _ in range(3):
        ledger.look()
        ledger.write(SPENT)
        another.look()
    another.write(replace(SPENT, key="other"))
    assert ledger.error is not None
    assert sum("cannot be used" in record.getMessage() for record in caplog.records) == 2, "once in each process"
    assert (ledger.today("team").requests, another.today("other").requests) == (4, 1)
    path.rmdir() if kind == "folder" else path.unlink()
    for one in (ledger, another, ledger):
        one.look()
        assert one.error is None
    for one in (ledger, another, Ledger(tmp_path, Clock())):
        assert (one.today("team").requests, one.today("other").requests) == (4, 1)


def test_a_file_that_grows_a_hole_gets_no_line_until_it_is_mended(tmp_path: Path) -> None:
    path, ledger = ledger_file(tmp_path, DAY), Ledger(tmp_path, Clock())
    ledger.write(SPENT)
    size = path.stat().st_size
    os.truncate(path, 300 * 2**20)
    ledger.write(SPENT)
    ledger.look()
    assert ledger.error is not None
    assert ledger.today("team").requests == 2
    os.truncate(path, size)
    ledger.look()
    assert ledger.error is None
    assert Ledger(tmp_path, Clock()).today("team") == ledger.today("team") == Totals(2, 20, 8, 14, 10)


@given(counts=st.lists(st.sampled_from([0, 1, MAX_COUNT]), min_size=1, max_size=5), number=st.integers(0, 2**65))
@settings(max_examples=examples(50))
def test_sums_are_exact_however_large(counts: list[int], number: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = ledger_file(folder, DAY)
        counts = [*counts, number]
        path.write_bytes(
            b"".join(
                b'{"key":"team","prompt_tokens":%d,"cached_tokens":0,"output_tokens":%d}\n' % (count, count)
                for count in counts
            )
        )
        ledger = Ledger(folder, Clock())
        taken = [count for count in counts if count <= MAX_COUNT]
        for _ in range(2):
            assert ledger.today("team") == Totals(len(taken), sum(taken), 0, sum(taken), 0)
            path.unlink()
            ledger.look()
        again = Ledger(folder, Clock())
        assert again.today("team") == ledger.today("team")
        again.close()
        ledger.close()


def test_requests_end_while_a_look_is_held_up(tmp_path: Path) -> None:
    """As by a file system that does not answer."""
    ledger = Ledger(tmp_path, Clock())
    ledger.write(SPENT)
    ledger.look()
    ledger._files.acquire()
    for _ in range(3):
        ledger.write(SPENT)
    assert (ledger.today("team").requests, ledger.today("other")) == (4, Totals())
    assert len(lines(tmp_path)) == 1
    ledger._files.release()
    ledger.catch_up()
    assert [line["outcome"] for line in lines(tmp_path)] == ["completed"] * 4
    assert ledger.today("team").requests == 4


def test_looks_in_another_thread_lose_nothing(tmp_path: Path) -> None:
    path, ledger, ended = ledger_file(tmp_path, DAY), Ledger(tmp_path, Clock()), threading.Event()

    def look() -> None:
        while not ended.is_set():
            ledger.look()
            ledger.sync()
            path.unlink(missing_ok=True)
        ledger.look()

    with ThreadPoolExecutor(1) as thread:
        looking = thread.submit(look)
        for number in range(1, 301):
            ledger.write(SPENT)
            assert ledger.today("team").requests == number
        ended.set()
        looking.result()
    ledger.catch_up()
    ledger.look()
    assert Ledger(tmp_path, Clock()).today("team").requests == 300


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b'{"key":1,"output_tokens":1}',
        b'{"key":"team","output_tokens":"x"}',
        b"\xff\xfe",
        b"[" * 5000,
        b"9" * 5000,
    ]
    + [b'{"key":"team","prompt_tokens":-5,"cached_tokens":0,"output_tokens":0}'],
)
def test_lines_that_are_none_of_ours_are_passed_over(tmp_path: Path, line: bytes) -> None:
    ledger = Ledger(tmp_path, Clock())
    with ledger_file(tmp_path, DAY).open("ab") as file:
        file.write(line + b"\n")
    ledger.write(SPENT)
    assert ledger.today("team").requests == len(list(read_ledger(tmp_path, DAY, DAY))) == 1
