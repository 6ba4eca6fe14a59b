"""The terminal passes on our workers' lines and drops the rest of what Ray carries to it."""

import io
import os
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
    remote = "(ServeReplica:a:Ingress pid=7, ip=10.0.0.2) ERROR serve_app.api.guard: request x failed\n"
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
