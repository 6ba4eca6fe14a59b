"""`serve-app serve`: `serve run CONFIG` on Ray's fast path, on loopback, with its progress on the terminal.

Decides: the environment Ray starts with, when the server counts as ready (a token came out of it over HTTP), what
signals do (SIGINT, SIGTERM: drain and end; SIGUSR1: read the file again), and how the process ends: 0 after a signal
and a drain, 1 when the deployment failed or Ray or the proxy was lost, 2 when the configuration is refused, 130 at a
second SIGINT, which ends all at once. Ray and everything below it are children of this process and end with it.
"""

import logging
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from serve_app.errors import ConfigError
from serve_app.launch import haproxy
from serve_app.launch.config_file import INGRESS, ConfigFile, read_config, write_without_tls
from serve_app.launch.impatience import at_once_on_second_interrupt, kill_descendants
from serve_app.launch.kept_folder import KeptFolder
from serve_app.launch.kernels import compile_kernels
from serve_app.launch.ports import check_port, free_port
from serve_app.launch.processes import NodeWatch
from serve_app.launch.ray_node import load_application, start_node
from serve_app.launch.readiness import example, first_token, write_internal_key
from serve_app.launch.terminal import Terminal
from serve_app.launch.tls import HAPROXY_SOCKET, WatchedKeyPair
from serve_app.precedence import interrupt_nobody
from serve_app.settings import (
    FAST_PATH_ENVIRONMENT,
    HAPROXY_METRICS_PORT,
    INTERNAL_KEY_FILE,
    LAUNCHER_ENVIRONMENT,
    export,
    haproxy_enabled,
    haproxy_metrics_port,
    memory_monitor_enabled,
)

if TYPE_CHECKING:
    from serve_app.launch.drain import Ingresses

_POLL_S = 0.25
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
# For the ends of streams that HAProxy has and the clients have not.
_LAST_BYTES_S = 1.0
_LOGS = "/tmp/ray/session_latest/logs"
_INTERNAL_KEY = "internal-key"
_INTERRUPTED = 130  # as a shell reports that SIGINT ended a process
_MEMORY = (
    "Ray's memory monitor is off, as it ends serving processes when anybody fills the machine; the kernel's own stays "
    "(RAY_memory_monitor_refresh_ms=250 turns Ray's on)"
)


def launch(config_path: Path) -> int:
    """Serve `config_path` until a signal; returns the exit status. To be called in the main thread."""
    started = time.monotonic()
    # In /tmp because HAProxy's socket goes there and a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="serve-app-", dir="/tmp") as scratch:
        export(_environment(Path(scratch)))
        internal_key = write_internal_key(Path(scratch) / _INTERNAL_KEY)
        try:
            target = read_config(config_path)
            check_port(target.host, target.port)
            key_pair = _key_pair_for_haproxy(Path(scratch), target)
        except ConfigError as error:
            _complain(f"{config_path}: {error}")
            return 2
        _bound_requests(Path(scratch), target)
        interrupt_nobody()  # nor does anything that Ray starts, except for the engines' threads
        return _Launch(config_path, target, started, Path(scratch), internal_key, key_pair).run()


class _DeploymentError(Exception):
    """Serve has given up on the application; the message is one line."""


class _Launch:
    """One run: `serve run` in the main thread, a watcher beside it."""

    def __init__(
        self,
        config_path: Path,
        target: ConfigFile,
        started: float,
        scratch: Path,
        internal_key: str,
        key_pair: WatchedKeyPair | None,
    ) -> None:
        self._config_path = config_path
        self._key_pair = key_pair
        self._scratch = scratch
        self._internal_key = internal_key
        self._target = target
        self._started = started
        self._failure: str | None = None
        self._stopping = threading.Event()
        self._reload = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._ending = False
        self._prepared: Ingresses | None = None

    def run(self) -> int:
        import click

        self._say("starting Ray")
        threading.Thread(target=compile_kernels, args=(self._target.ours.values(),), daemon=True).start()
        with (
            self._signals(),
            at_once_on_second_interrupt(self._end_at_once),
            self._terminal(),
            closing(NodeWatch(self._lose, self._say)) as node,
            suppress(KeyboardInterrupt, SystemExit, click.Abort),
        ):
            _make_rays_token()
            start_node()
            node.start()
            signal.signal(signal.SIGTERM, self._stop)  # ray.init takes it for itself
            if self._target.ours:
                load_application()
            import ray
            from ray.serve import scripts  # only now, while the node's first processes start

            if not memory_monitor_enabled():
                self._say(_MEMORY)
            self._say(f"Ray is up; deploying {self._config_path}")
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
            self._watcher.start()
            config = self._config_path
            if self._key_pair is not None:
                config = self._scratch / "config.yaml"
                write_without_tls(self._config_path, config)
            scripts.run.main([str(config)], standalone_mode=False)
            self._stopping.set()
            node.close()
            ray.shutdown()
        if self._failure is not None:
            _complain(self._failure)
            return 1
        return 0

    @contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda _number, _frame: self._reload.set())
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def _terminal(self) -> Iterator[None]:
        with redirect_stdout(Terminal(sys.stdout, self._say)), redirect_stderr(Terminal(sys.stderr, self._say)):
            yield

    def _end_at_once(self) -> None:
        """Without drain and without Ray: every process below this one ends, and then this one."""
        self._say("interrupted again: ending at once")
        _exit(self._scratch, _INTERRUPTED)

    def _lose(self, what: str, can_drain: bool) -> None:
        """Drain without the part of Ray that was lost, and end: Ray cannot end in its own way any more."""
        self._say(what)
        if can_drain and self._prepared is not None:
            with suppress(Exception):  # of Ray's, whatever it is
                self._prepared.drain(self._drain_limit_s)
            time.sleep(_LAST_BYTES_S)
        _exit(self._scratch, 1)

    def _ingresses(self) -> "Ingresses":
        """Kept for the loss of Ray's GCS, without which they cannot be found."""
        from serve_app.launch.drain import Ingresses

        self._prepared = Ingresses(self._target.ours)
        return self._prepared

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        """The first signal drains, or ends a start; a second SIGINT is `_end_at_once`'s."""
        if self._ending:
            raise KeyboardInterrupt
        if self._stopping.is_set():
            return
        self._stopping.set()
        if not self._watcher.is_alive():
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """Beside `serve run`: wait for the first token or a failure, then for signals; drain; end `serve run`."""
        try:
            from serve_app.launch.watch import Watch

            model = None
            while not self._stopping.is_set() and (model := self._served_model()) is None:
                self._stopping.wait(_POLL_S)
            # Before anybody is told that the server is ready, so that no death after that is taken for an old one.
            watch = None if model is None else Watch(self._target.url, self._say)
            kept = KeptFolder(self._scratch, self._say)
            if model is not None:
                self._ingresses()
                wants_key = any(settings.ingress.keys_file is not None for settings in self._target.ours.values())
                command = example(self._target.url, model, wants_key=wants_key)
                self._say(f"ready: {model} served its first token. Try:\n{command}")
            deploying = False
            while not self._stopping.wait(_POLL_S):
                if self._reload.is_set():
                    self._reload.clear()
                    deploying = self._deploy_again()
                deploying = deploying and not self._has_deployed()
                if self._key_pair is not None and (told := self._key_pair.look()) is not None:
                    self._say(told)
                kept.look()
                if watch is not None and (lost := watch.look()) is not None:
                    raise _DeploymentError(lost)
            self._end(drain=model is not None)
        except Exception as error:
            # Our errors are one line; of Ray's, the first line says what happened.
            kind = "" if isinstance(error, _DeploymentError) else f"{type(error).__name__}: "
            self._failure = kind + str(error).strip().partition("\n")[0]
        self._ending = True
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGTERM)

    def _deploy_again(self) -> bool:
        """Read the config file again and let Serve change what it must: knobs at once, replicas one after another.

        False if the file is refused.
        """
        from serve_app.serving.ray_patches import deploy_again

        try:
            target = read_config(self._config_path)
            before = self._target
            if (target.host, target.port, target.key_pair) != (before.host, before.port, before.key_pair):
                raise ConfigError("http_options: host, port and files cannot change while the server runs")
        except ConfigError as error:
            self._say(f"{self._config_path}: {error}; nothing has changed")
            return False
        self._target = target
        _bound_requests(self._scratch, target)
        deploy_again(target.schema)
        self._say(f"deploying {self._config_path} again")
        return True

    def _has_deployed(self) -> bool:
        """Whether the second or a later deployment is over, and say how. If it failed, the old replicas serve on."""
        try:
            if not self._is_running():
                return False
        except _DeploymentError as error:
            self._say(str(error))
        else:
            self._say("deployed")
            self._ingresses()
        return True

    def _end(self, *, drain: bool) -> None:
        """Take no new requests, let the running ones finish or end them with an error.

        Our applications stay, to refuse whoever comes, until `serve run` stops HAProxy, which would cut every stream.
        Others have no drain of their own; deleting them is theirs.
        """
        from ray import serve

        if drain:
            self._say("stopping: no new requests, waiting for the running ones")
            deadline = time.monotonic() + self._drain_limit_s
            try:
                self._ingresses().drain(self._drain_limit_s)
                while self._has_stopping_ingress() and time.monotonic() < deadline:
                    time.sleep(_POLL_S)
            except Exception as error:  # of Ray's, whatever it is: an ingress that does not live has nothing to drain
                self._say(f"draining failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            time.sleep(_LAST_BYTES_S)
        for name in set(self._target.applications) - self._target.ours.keys():
            serve.delete(name)

    @property
    def _drain_limit_s(self) -> float:
        return max((settings.ingress.drain_timeout_s for settings in self._target.ours.values()), default=0.0)

    def _has_stopping_ingress(self) -> bool:
        """Whether there is one that an update has just replaced; it drains by itself."""
        from ray import serve

        applications = serve.status().applications
        ingresses = (applications[name].deployments.get(INGRESS) for name in self._target.ours if name in applications)
        return any(ingress is not None and ingress.replica_states.get("STOPPING") for ingress in ingresses)

    def _is_running(self) -> bool:
        """Whether all applications run. Raises `_DeploymentError` if one never will.

        One that only lacks a replica that died will: Ray replaces it.
        """
        from ray import serve

        states = serve.status().applications
        for name in self._target.applications:
            if name in states and states[name].status in _FAILED:
                deployments = states[name].deployments.values()
                reasons = [deployment.status_trigger for deployment in deployments if deployment.status in _FAILED]
                if reasons and all(reason == "HEALTH_CHECK_FAILED" for reason in reasons):
                    return False
                parts = [states[name].message, *(deployment.message for deployment in deployments)]
                raise _DeploymentError(f"deployment failed: {find_cause(parts)} (logs: {_LOGS})")
        return all(name in states and states[name].status == "RUNNING" for name in self._target.applications)

    def _served_model(self) -> str | None:
        """The model's name once all applications run and a token has come out of it over HTTP."""
        if not self._is_running() or (haproxy_enabled() and not self._is_reached_by_haproxy()):
            return None
        return first_token(self._target.url, self._internal_key)

    def _is_reached_by_haproxy(self) -> bool:
        """Ray says that an application runs before it tells HAProxy of its ingress."""
        try:
            return all(haproxy.reaches_ingress(haproxy_metrics_port(), name) for name in self._target.ours)
        except (OSError, ValueError):
            return False

    def _say(self, text: str) -> None:
        # In one piece: print() writes the line's end by itself, and another thread's line could come in between.
        assert sys.__stdout__ is not None
        sys.__stdout__.write(f"serve-app [{time.monotonic() - self._started:5.1f} s] {text}\n")
        sys.__stdout__.flush()


def _exit(scratch: Path, status: int) -> NoReturn:
    shutil.rmtree(scratch, ignore_errors=True)
    kill_descendants()
    os._exit(status)


def _environment(scratch: Path) -> Mapping[str, str]:
    """Everything that Ray must find in its environment. A variable that the user has set wins."""
    return {
        **FAST_PATH_ENVIRONMENT,
        **LAUNCHER_ENVIRONMENT,
        # Four by default: more wake-ups for the same answers, on cores that the model needs.
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, max(1, (os.cpu_count() or 1) // 4))),
        # Headers that do not fit are answered by a page of HAProxy's own: twice what the ingress takes, which says why.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(32 * 2**10),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(haproxy.write_wrapper(scratch)),
        INTERNAL_KEY_FILE: str(scratch / _INTERNAL_KEY),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(scratch / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(scratch / HAPROXY_SOCKET),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(scratch),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(scratch / "server-state"),
        HAPROXY_METRICS_PORT: str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
    }


def _key_pair_for_haproxy(scratch: Path, target: ConfigFile) -> WatchedKeyPair | None:
    """None where nothing is encrypted, and where Ray's own proxy does it. Raises `ConfigError`."""
    return WatchedKeyPair(target.key_pair, scratch) if target.key_pair is not None and haproxy_enabled() else None


def _make_rays_token() -> None:
    """Whoever has the token may run code through Ray's ports, and Ray would write it for every user to read."""
    token = Path.home() / ".ray" / "auth_token"
    with suppress(OSError):  # it may come from elsewhere
        token.parent.mkdir(exist_ok=True)
        if token.exists():
            token.chmod(0o600)
            return
        with tempfile.NamedTemporaryFile("w", dir=token.parent) as new:  # for this user alone
            new.write(secrets.token_hex(32))
            new.flush()
            os.link(new.name, token)  # unless another start was first


def _bound_requests(scratch: Path, target: ConfigFile) -> None:
    haproxy.write_additions(scratch, target.ours)


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
