"""The program that Ray starts as HAProxy: it edits the configuration that Ray has written, then becomes HAProxy.

Runs by itself, on the standard library alone: `python -I haproxy_config.py FOLDER BINARY ARGUMENTS...`. The launcher
keeps what it adds in FOLDER (see `haproxy`). `setpriv` lets HAProxy end with the process that started it, however that
ends; `setsid` keeps a terminal's Ctrl-C from cutting the streams that are to be drained.
"""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

ADDITIONS = "additions.json"
"""The file in FOLDER with an `Additions`."""
PEM = "tls.pem"
"""The file in FOLDER with certificate and key, where the server has a certificate."""
HEALTH = "/health /health/live /health/ready /ping"

_EDITED = "# edited by serve_app"
_LOOPBACK_BIND = re.compile(r"^(\s*bind )[*]?:")
_DROPPED = re.compile(r"\s*(option splice-request|errorfile 50[234] .*)")
_HEALTH_REQUESTS = 64
"""Requests for health that an ingress has at once, beside all others."""
_QUEUE_TIMEOUT_S, _HEALTH_QUEUE_TIMEOUT_S = 60, 5
"""How long a request waits for an ingress that has as many as it may."""


class Additions(TypedDict):
    """What the launcher adds to Ray's configuration. Texts are in HAProxy's language."""

    frontend: str
    """For the frontend that clients reach."""
    backend: str
    """For the backends of our applications."""
    sections: str
    """Sections of their own."""
    no_route: str
    """The rule for a path of no application."""
    no_application: str
    """The rule while Ray has reported no application."""
    most_requests: Mapping[str, int]
    """Requests that an ingress has at once, by the backend of its application. Others wait in HAProxy."""


def edit(config: str, additions: Additions, certificate: Path | None) -> str:
    """Ray's `config` with the additions. Returns a configuration that has been edited before as it is."""
    if config.startswith(_EDITED):
        return config
    lines = config.splitlines()
    health: list[str] = []
    edited = [*_edit_lines(lines, additions, certificate, health)]
    return "\n".join([_EDITED, *edited, *health, additions["sections"], ""])


def _edit_lines(
    lines: Sequence[str], additions: Additions, certificate: Path | None, health: list[str]
) -> Iterator[str]:
    """The edited lines; sections for health checks are appended to `health`."""
    section, limits = "", additions["most_requests"]
    has_applications = any(line.split()[:1] == ["use_backend"] for line in lines)
    for line in lines:
        if line[:1].strip():
            section = " ".join(line.split())
        kind, *words = line.split() or [""]
        name = section.removeprefix("backend ")
        if _DROPPED.fullmatch(line):
            continue
        if kind == "bind":
            yield _bind(line, section, certificate)
        elif kind == "use_backend" and words[0] in limits:
            yield f"    use_backend {words[0]}-health {' '.join(words[1:])} {{ path -m end {HEALTH} }}"
            yield line
        elif kind == "server" and name in limits:
            yield f"{line} maxconn {limits[name]}"
            health.append(_health_server(name, words))
        elif section == "backend default_backend" and kind == "http-request":
            yield additions["no_route"] if has_applications else additions["no_application"]
        else:
            yield line
        if line == section == "frontend http_frontend":
            yield additions["frontend"]
        elif line == section and name in limits:
            yield f"    timeout queue {_QUEUE_TIMEOUT_S}s\n{additions['backend']}"
            timeout = f"    timeout queue {_HEALTH_QUEUE_TIMEOUT_S}s"
            health.append(f"backend {name}-health\n    http-reuse always\n{timeout}\n{additions['backend']}")


def _bind(line: str, section: str, certificate: Path | None) -> str:
    """The clients' frontend gets the certificate; everything else listens on loopback."""
    if section != "frontend http_frontend":
        return _LOOPBACK_BIND.sub(r"\g<1>127.0.0.1:", line)
    # A limit per connection does not hold for the streams of HTTP/2, so it is not offered.
    return line if certificate is None else f"{line} ssl crt {certificate} alpn http/1.1"


def _health_server(backend: str, words: Sequence[str]) -> str:
    """The same ingress for requests for health, which so never wait behind others for it."""
    name, address, *options = words
    track = f" track {backend}/{name}" if "check" in options else ""
    backup = " backup" if "backup" in options else ""
    # An idle connection is kept: a new one would wait behind all that the ingress has not accepted yet.
    return f"    server {name} {address}{track}{backup} maxconn {_HEALTH_REQUESTS} pool-purge-delay 1h"


def main(folder: Path, binary: str, arguments: Sequence[str]) -> None:
    """Edit the file behind `-f` in place, as Ray knows its HAProxy by that name, and become HAProxy."""
    additions: Additions = json.loads((folder / ADDITIONS).read_text())
    config = Path(arguments[arguments.index("-f") + 1])
    certificate = folder / PEM
    config.write_text(edit(config.read_text(), additions, certificate if certificate.exists() else None))
    os.execvp("setsid", ["setsid", "setpriv", "--pdeathsig", "KILL", "--", binary, *arguments])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
