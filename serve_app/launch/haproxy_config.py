"""The program that Ray runs as HAProxy: edits Ray's configuration, then executes HAProxy.

Runs standalone with the standard library only: `python -I haproxy_config.py FOLDER BINARY
ARGUMENTS...`. FOLDER has the launcher's additions (see `haproxy`). `setpriv` makes HAProxy end with
its parent process, however the parent ends. `setsid` prevents a terminal's Ctrl-C from cutting
streams during a drain.
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
"""The file in FOLDER with certificate and key, if the server has a certificate."""
HEALTH = "/health /health/live /health/ready /ping"

_EDITED = "# edited by serve_app"
_LOOPBACK_BIND = re.compile(r"^(\s*bind )[*]?:")
_DROPPED = re.compile(r"\s*(option splice-request|errorfile 50[234] .*)")
_HEALTH_REQUESTS = 64
"""Maximum of concurrent health checks per ingress, in addition to other requests."""
_IDLE_HEALTH_CONNECTIONS = 8
"""Maximum of idle connections that HAProxy keeps to an ingress for health checks."""
_QUEUE_TIMEOUT_S, _HEALTH_QUEUE_TIMEOUT_S = 60, 5
"""How long a request waits for an ingress that is at its limit."""


class Additions(TypedDict):
    """The launcher's additions to Ray's configuration, in HAProxy's syntax."""

    frontend: str
    """For the frontend that clients connect to."""
    backend: str
    """For the backends of our applications."""
    sections: str
    """Separate sections."""
    no_route: str
    """The rule for a path of no application."""
    no_application: str
    """The rule while Ray has reported no application."""
    most_requests: Mapping[str, int]
    """Concurrent requests per ingress, by its application's backend. Others wait in HAProxy."""


def edit(config: str, additions: Additions, certificate: Path | None) -> str:
    """Return Ray's `config` with the additions. A config that is already edited is not changed."""
    if config.startswith(_EDITED):
        return config
    lines = config.splitlines()
    health: list[str] = []
    edited = [*_edit_lines(lines, additions, certificate, health)]
    return "\n".join([_EDITED, *edited, *health, additions["sections"], ""])


def _edit_lines(
    lines: Sequence[str], additions: Additions, certificate: Path | None, health: list[str]
) -> Iterator[str]:
    """Yield the edited lines; append sections for health checks to `health`."""
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
    """Add the certificate to the clients' frontend; bind everything else to loopback."""
    if section != "frontend http_frontend":
        return _LOOPBACK_BIND.sub(r"\g<1>127.0.0.1:", line)
    # HTTP/2 is not offered, because its streams are not subject to limits per connection.
    return line if certificate is None else f"{line} ssl crt {certificate} alpn http/1.1"


def _health_server(backend: str, words: Sequence[str]) -> str:
    """Return a second server line of the ingress, for health checks only.

    So health checks never wait behind other requests.
    """
    name, address, *options = words
    track = f" track {backend}/{name}" if "check" in options else ""
    backup = " backup" if "backup" in options else ""
    # Keep some idle connections: a new one would wait behind all connections that the ingress has
    # not accepted yet.
    kept = f"pool-purge-delay 1h pool-max-conn {_IDLE_HEALTH_CONNECTIONS}"
    return f"    server {name} {address}{track}{backup} maxconn {_HEALTH_REQUESTS} {kept}"


def main(folder: Path, binary: str, arguments: Sequence[str]) -> None:
    """Edit the file given by `-f` in place and execute HAProxy.

    Ray recognizes its HAProxy by that file's name.
    """
    additions: Additions = json.loads((folder / ADDITIONS).read_text())
    config = Path(arguments[arguments.index("-f") + 1])
    certificate = folder / PEM
    config.write_text(edit(config.read_text(), additions, certificate if certificate.exists() else None))
    os.execvp("setsid", ["setsid", "setpriv", "--pdeathsig", "KILL", "--", binary, *arguments])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
