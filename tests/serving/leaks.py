"""What must stand nowhere, and all places where whoever looks at a server from outside could find
it."""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from serve_app.environment import INTERNAL_KEY_FILE
from tests.serving.conftest import Server

RAY_TOKEN = Path.home() / ".ray" / "auth_token"

_REPLICAS_KEYS = """
import asyncio, json, sys, ray
ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False, logging_level="error")
from serve_app.fleet.link import LINK
from serve_app.serving.ray_patches import running_replicas
from serve_app.serving.scraping import METRICS_KEY
running = asyncio.run(running_replicas())
known = [one.replica_metadata for replicas in running.values() for one in replicas]
print(json.dumps([key for data in known if LINK in data for key in (data[LINK][1], data[METRICS_KEY])]))
"""


def internal_key_file(server: Server) -> Path:
    """The launcher's, whose path its children know."""
    (path,) = {_environment(process).get(INTERNAL_KEY_FILE, "") for process in _processes(server)} - {""}
    return Path(path)


def keys_of_replicas(server: Server) -> list[str]:
    """Of each engine replica the key of its link and that of its metrics port, asked of Serve's
    controller."""
    (address,) = {found for command in _commands(server) for found in re.findall(r"--gcs-address=(\S+)", command)}
    environment = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
    asked = subprocess.run(
        [sys.executable, "-c", _REPLICAS_KEYS, address], env=environment, capture_output=True, text=True, timeout=120
    )
    assert asked.returncode == 0, asked.stderr
    return list(json.loads(asked.stdout.splitlines()[-1]))


def shown_by(server: Server) -> list[str]:
    """Its output, Ray's logs, and its processes' command lines and environments."""
    commands = _commands(server)
    (session,) = {found for command in commands for found in re.findall(r"/tmp/ray/session_[\d_-]+", command)}
    logs = [path.read_text(errors="replace") for path in Path(session, "logs").rglob("*") if path.is_file()]
    environments = ["\n".join(_environment(process).values()) for process in _processes(server)]
    return ["\n".join(server.lines), *logs, *commands, *environments]


def _processes(server: Server) -> list[psutil.Process]:
    return [psutil.Process(server.process.pid), *server.descendants()]


def _commands(server: Server) -> list[str]:
    commands = []
    for process in _processes(server):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            commands.append(" ".join(process.cmdline()))
    return commands


def _environment(process: psutil.Process) -> dict[str, str]:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return dict(process.environ())
    return {}
