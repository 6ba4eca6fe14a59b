"""`serve-app serve`: `serve run CONFIG` on Ray's fast path, on loopback, with its progress on the terminal.

Decides: the environment Ray starts with, when the server counts as ready (a token came out of it over HTTP), what
signals do (SIGINT, SIGTERM: drain and end; SIGUSR1: read the file again), and how the process ends: 0 after a signal
and a drain, 1 when the deployment failed or Ray or the proxy was lost, 2 when the configuration is refused, 130 at a
second SIGINT, which ends all at once. Ray and everything below it are children of this process and end with it.
"""

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TypeVar

from serve_app.environment import (
    bypass_proxies,
    export,
    haproxy_enabled,
    haproxy_metrics_port,
    memory_monitor_enabled,
    ray_temporary_folder,
)
from serve_app.errors import ConfigError
from serve_app.launch import haproxy
from serve_app.launch.bounded import BoundedCalls, first_line
from serve_app.launch.config_file import ConfigFile, read_config, write_for_ray
from serve_app.launch.deployment import DeploymentError, delete, has_stopping_ingress, is_running, logs_folder
from serve_app.launch.force_quit import at_once_on_second_interrupt, kill_descendants
from serve_app.launch.gpus import check_gpus
from serve_app.launch.kept_folder import KeptFolder
from serve_app.launch.kernels import compile_kernels
from serve_app.launch.ports import check_port
from serve_app.launch.processes import NodeWatch
from serve_app.launch.ray_environment import INTERNAL_KEY, launcher_environment
from serve_app.launch.ray_node import load_application, start_node
from serve_app.launch.readiness import example, first_token, write_internal_key
from serve_app.launch.surroundings import check_surroundings
from serve_app.launch.terminal import Terminal, write_line
from serve_app.launch.tls import WatchedKeyPair
from serve_app.launch.update import Update
from serve_app.system.cpu_priority import yield_cpu

if TYPE_CHECKING:
    from serve_app.launch.drain import Ingresses

T = TypeVar("T")

_POLL_S = 0.25
# How long Ray may take to answer a question, or to delete an application.
_ANSWER_S, _DELETE_S = 10.0, 60.0
_FIRST_TOKEN_S = 150.0
# For the ends of streams that HAProxy has and the clients have not.
_LAST_BYTES_S = 1.0
_INTERRUPTED = 130  # as a shell reports that SIGINT ended a process
_MEMORY = (
    "Ray's memory monitor is off, as it ends serving processes when anybody fills the machine; the kernel's own stays "
    "(RAY_memory_monitor_refresh_ms=250 turns Ray's on)"
)


def launch(config_path: Path) -> int:
    """Serve `config_path` until a signal; returns the exit status. To be called in the main thread."""
    started = time.monotonic()
    try:
        check_surroundings(Path(ray_temporary_folder()))
        # In /tmp because HAProxy's socket goes there and a socket's path must be short.
        with tempfile.TemporaryDirectory(prefix="serve-app-", dir="/tmp", ignore_cleanup_errors=True) as scratch:
            return _prepare(config_path, Path(scratch), started).run()
    except (ConfigError, OSError) as error:
        _complain(str(error))
        return 2


def _prepare(config_path: Path, scratch: Path, started: float) -> "_Launch":
    """All that is done before anything starts. Raises `ConfigError`, and `OSError` where `scratch` takes no files."""
    bypass_proxies()
    export(launcher_environment(scratch))
    internal_key = write_internal_key(scratch / INTERNAL_KEY)
    try:
        target = read_config(config_path)
        check_port(target.host, target.port)
        key_pair = _key_pair_for_haproxy(scratch, target)
    except ConfigError as error:
        raise ConfigError(f"{config_path}: {error}") from None
    haproxy.write_additions(scratch, target.ours)
    yield_cpu()  # nor does anything that Ray starts, except for the engines' threads
    return _Launch(config_path, target, started, scratch, internal_key, key_pair)


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
        self._update = Update(config_path, target, scratch, self._say, self._ingresses)
        self._started = started
        self._failure: str | None = None
        self._status = 0
        self._rays = BoundedCalls(self._say)
        self._prepared: Ingresses | None = None
        self._node = NodeWatch(self._lose, self._say)
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._ending = False

    def run(self) -> int:
        """The exit status: 0 after a signal, 1 for a start that failed, 2 for what this machine cannot do."""
        import click

        self._say("starting Ray")
        threading.Thread(target=compile_kernels, args=(self._target.ours.values(),), daemon=True).start()
        with (
            self._signals(),
            at_once_on_second_interrupt(self._end_at_once),
            self._terminal(),
            closing(self._node),
        ):
            try:
                self._serve()
            except (KeyboardInterrupt, SystemExit, click.Abort):
                pass
            except ConfigError as error:
                self._fail(f"{self._config_path}: {error}", 2)
            except Exception as error:
                self._fail(f"the start failed: {first_line(error)} (logs: {logs_folder()})")
            if not self._stopping.is_set():
                self._fail(f"Ray Serve ended by itself (logs: {logs_folder()})")
        if self._failure is not None:
            _complain(self._failure)
        return self._status

    def _serve(self) -> None:
        """Returns, or raises `KeyboardInterrupt` or `SystemExit`, when the server has ended."""
        start_node()
        self._node.start()
        signal.signal(signal.SIGTERM, self._stop)  # ray.init takes it for itself
        check_gpus(self._target)
        if self._target.ours:
            load_application()
        import ray
        from ray.serve import scripts  # only now, while the node's first processes start

        if not memory_monitor_enabled():
            self._say(_MEMORY)
        self._say(f"Ray is up; deploying {self._config_path}")
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        self._watcher.start()
        config = self._scratch / "config.yaml"
        write_for_ray(self._target, config)
        scripts.run.main([str(config)], standalone_mode=False)
        self._node.close()
        ray.shutdown()

    def _fail(self, failure: str, status: int = 1) -> None:
        """End with this line, unless there is one already."""
        if self._failure is None:
            self._failure, self._status = failure, status

    @contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda _number, _frame: self._update.ask())
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def _terminal(self) -> Iterator[None]:
        with redirect_stdout(Terminal(sys.stdout, self._say)), redirect_stderr(Terminal(sys.stderr, self._say)):
            yield

    def _end_at_once(self, said: str = "interrupted again: ending at once", status: int = _INTERRUPTED) -> NoReturn:
        """Without drain and without Ray: every process below this one ends, and then this one."""
        self._say(said)
        self._node.close()
        _exit(self._scratch, status)

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
            model = self._wait_for_first_token()
        except DeploymentError as error:
            self._fail(str(error))
        except Exception as error:
            self._fail(f"the start failed: {first_line(error)} (logs: {logs_folder()})")
        else:
            if model is None:
                self._end_at_once("stopping: it was not ready yet", 0)
            self._look_after(model)
        self._stopping.set()
        self._ending = True
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGTERM)

    def _wait_for_first_token(self) -> str | None:
        """The model's name; None after a signal. Raises `DeploymentError`, and whatever Ray raises."""
        from serve_app.serving.gpus import GpuReports

        reports = GpuReports(self._say)
        while not self._stopping.is_set():
            try:
                self._rays.call(reports.look, _ANSWER_S, self._stopping.is_set)
                if (model := self._rays.call(self._served_model, _FIRST_TOKEN_S, self._stopping.is_set)) is not None:
                    return model
            except TimeoutError:
                pass  # as before: it is not ready
            self._stopping.wait(_POLL_S)
        return None

    def _look_after(self, model: str) -> None:
        """Until a signal, and to the end of the drain. What an operator's file or Ray does wrong ends nothing here."""
        from serve_app.launch.watch import Watch

        # Before anybody is told that the server is ready, so that no death after that is taken for an old one.
        watch = Watch(self._target.url, self._say, self._stopping.is_set)
        self._rays.attempt("the ingresses", self._ingresses, None, 2 * _ANSWER_S)
        wants_key = any(settings.ingress.keys_file is not None for settings in self._target.ours.values())
        command = example(self._target.url, model, wants_key=wants_key)
        self._say(f"ready: {model} served its first token. Try:\n{command}")
        threading.Thread(target=self._update.follow, args=(self._stopping,), daemon=True).start()
        kept = KeptFolder(self._scratch, self._say)
        while not self._stopping.wait(_POLL_S):
            if self._key_pair is not None and (told := self._see("the certificate", self._key_pair.look)) is not None:
                self._say(told)
            self._see(f"the files in {self._scratch}", kept.look)
            if (lost := self._see("a look at the server failed", watch.look)) is not None:
                self._fail(lost)
                return
        self._end()

    def _see(self, what: str, look: Callable[[], T]) -> T | None:
        """What `look` returns; None where it raises, which is said and hinders no other look."""
        try:
            return look()
        except Exception as error:
            self._rays.report(what, error)
            return None

    def _end(self) -> None:
        """Take no new requests, let the running ones finish or end them with an error.

        Our applications stay, to refuse whoever comes, until `serve run` stops HAProxy, which would cut every stream.
        Others have no drain of their own; deleting them is theirs.
        """
        self._say("stopping: no new requests, waiting for the running ones")
        limit_s = self._drain_limit_s
        deadline = time.monotonic() + limit_s
        rays = BoundedCalls(self._say)  # no call to a controller that is away holds up the ingress's
        try:
            rays.call(lambda: self._ingresses().drain(limit_s), limit_s + 3 * _ANSWER_S)
            while rays.call(partial(has_stopping_ingress, self._target.ours), _ANSWER_S):
                if time.monotonic() >= deadline:
                    break
                time.sleep(_POLL_S)
        except Exception as error:  # of Ray's, whatever it is: an ingress that does not live has nothing to drain
            self._say(f"draining failed: {first_line(error)}")
        time.sleep(_LAST_BYTES_S)
        for name in set(self._target.applications) - self._target.ours.keys():
            rays.attempt(f"{name} was not deleted", partial(delete, name), None, _DELETE_S)

    @property
    def _target(self) -> ConfigFile:
        return self._update.target

    @property
    def _drain_limit_s(self) -> float:
        return max((settings.ingress.drain_timeout_s for settings in self._target.ours.values()), default=0.0)

    def _served_model(self) -> str | None:
        """The model's name once all applications run and a token has come out of it over HTTP."""
        if not is_running(self._target.applications) or (haproxy_enabled() and not self._is_reached_by_haproxy()):
            return None
        return first_token(self._target.url, self._internal_key)

    def _is_reached_by_haproxy(self) -> bool:
        """Ray says that an application runs before it tells HAProxy of its ingress."""
        try:
            return all(haproxy.reaches_ingress(haproxy_metrics_port(), name) for name in self._target.ours)
        except (OSError, ValueError):
            return False

    def _say(self, text: str) -> None:
        write_line(sys.__stdout__, f"serve-app [{time.monotonic() - self._started:5.1f} s] {text}")


def _exit(scratch: Path, status: int) -> NoReturn:
    shutil.rmtree(scratch, ignore_errors=True)
    kill_descendants()
    os._exit(status)


def _key_pair_for_haproxy(scratch: Path, target: ConfigFile) -> WatchedKeyPair | None:
    """None where nothing is encrypted, and where Ray's own proxy does it. Raises `ConfigError`."""
    return WatchedKeyPair(target.key_pair, scratch) if target.key_pair is not None and haproxy_enabled() else None


def _complain(text: str) -> None:
    write_line(sys.stderr, f"serve-app: {' '.join(text.split())}")
