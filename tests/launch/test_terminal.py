"""The terminal passes on our workers' lines and drops the rest of what Ray carries to it."""

import fcntl
import io
import os
import re
import subprocess
import sys
from contextlib import suppress

from serve_app.launch.terminal import Terminal, write_line

TRACEBACK = '\x1b[36m(ServeController pid=1)\x1b[0m   File "replica.py", line 1, in __init__'


def shown(*texts: str) -> tuple[list[str], str]:
    said: list[str] = []
    target = io.StringIO()
    terminal = Terminal(target, said.append)
    for text in texts:
        terminal.write(text)
    return said, target.getvalue()


def test_our_records_are_told_plainly() -> None:
    line = "\x1b[36m(ServeReplica:serve_app:EngineReplica pid=7188)\x1b[0m INFO serve_app.serving.replica: warming up\n"
    assert shown(line) == (["EngineReplica: warming up"], "")
    remote = "(ServeReplica:a:Ingress pid=7, ip=10.0.0.2) ERROR serve_app.api.door.guard: request x failed\n"
    assert shown(remote) == (["Ingress: ERROR: request x failed"], "")


def test_what_else_workers_say_is_dropped() -> None:
    assert shown(f"{TRACEBACK}\n", "(raylet) Task failed\n") == ([], "")


def test_lines_of_this_process_pass_whole_however_they_are_cut() -> None:
    assert shown("one", " line\ntw", "o\nunfinished") == ([], "one line\ntwo\n")


def test_what_serve_run_reports_is_dropped() -> None:
    assert shown("2026-11-21 11:55:27,536\tINFO scripts.py:489 -- Running config file: 'x'.\n") == ([], "")


def test_request_lines_pass_as_they_are() -> None:
    line = '{"time":"2026-11-21T15:00:00.000+00:00","request_id":"mine-1"}'
    assert shown(f"\x1b[36m(ServeReplica:serve_app:Ingress pid=7)\x1b[0m {line}\n") == ([], f"{line}\n")


def test_a_terminal_that_is_gone_or_full_ends_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone:
        write_line(gone, "said to nobody")
        Terminal(gone, lambda _: None).write("a line\n")
        with suppress(OSError):
            gone.close()
    with open("/dev/full", "w") as full:
        write_line(full, "said to a full disk")
        with suppress(OSError):
            full.close()
    write_line(None, "said to nothing")


def test_what_a_terminal_cannot_show_is_escaped() -> None:
    raw = io.BytesIO()
    target = io.TextIOWrapper(raw, "ascii")
    write_line(target, "caf\xe9 \udc80")
    assert raw.getvalue() == b"caf\\xe9 \\udc80\n"


# More than a pipe and the queue hold.
FLOOD = """
import sys
from serve_app.launch.terminal import write_line
for number in range(10_000):
    write_line(sys.stdout, f"{{number:099}}")
write_line(sys.stderr, "flooded")
{wait}
write_line(sys.stdout, "last")
"""


def test_a_pipe_that_is_not_read_keeps_no_server_from_ending() -> None:
    with subprocess.Popen([sys.executable, "-c", FLOOD.format(wait="")], stdout=-1, stderr=-1, text=True) as process:
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
        assert process.stderr is not None
        assert process.stderr.read() == "flooded\n", "each descriptor has its own queue"


def test_a_pipe_that_is_read_late_shows_all_that_fits_in_order_and_what_was_dropped() -> None:
    command = [sys.executable, "-c", FLOOD.format(wait="sys.stdin.readline()")]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == "flooded\n"
        shown = [process.stdout.readline() for _ in range(1000)]
        print("go on", file=process.stdin, flush=True)
        shown += process.stdout.readlines()
        assert process.wait(60) == 0
    *numbers, dropped, last = shown
    assert [int(number) for number in numbers] == list(range(len(numbers)))
    assert len(numbers) > 1000, "the queue's"
    told = re.fullmatch(r"serve-app: (\d+) lines were dropped here: not read\n", dropped)
    assert told is not None
    assert (int(told[1]) + len(numbers), last) == (10_000, "last\n")


def test_a_non_blocking_pipe_takes_every_line() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    with open(reader, "rb") as out, open(writer, "w") as target:
        write_line(target, "x" * 3 * size)
        assert out.read(3 * size + 1) == b"x" * 3 * size + b"\n"
