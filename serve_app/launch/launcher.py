"""`serve-app serve`: runs `serve run CONFIG` on Ray's fast path, with progress on the terminal.

Defines Ray's environment, and when the server is ready: after one token over HTTP. SIGINT and
SIGTERM drain and end the server; SIGUSR1 reads the file again. Exit status: 0 after a signal and a
drain; 1 if the deployment failed, or Ray or the proxy was lost; 2 for an invalid configuration; 130
after a second SIGINT, which ends everything at once. Ray and all its processes are children of this
process and end with it.
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
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

from serve_app.environment import (
    bypass_proxies,
    export,
    haproxy_enabled,
    memory_monitor_enabled,
    ray_temporary_folder,
)
from serve_app.errors import ConfigError
from serve_app.launch import haproxy
from serve_app.launch.bounded import BoundedCalls, first_line
from serve_app.launch.config_file import ConfigFile, read_config, write_for_ray
from serve_app.launch.config_source import ConfigSource
from serve_app.launch.deployment import DeploymentError, logs_folder
from serve_app.launch.ending import Ending
from serve_app.launch.force_quit import at_once_on_second_interrupt, kill_descendants
from serve_app.launch.gpus import check_gpus
from serve_app.launch.kept_folder import KeptFolder
from serve_app.launch.kernels import compile_kernels
from serve_app.launch.ports import check_port
from serve_app.launch.processes import NodeWatch
from serve_app.launch.ray_environment import INTERNAL_KEY, launcher_environment
from serve_app.launch.ray_node import load_application, start_node
from serve_app.launch.readiness import served_model, welcome, write_internal_key
from serve_app.launch.surroundings import check_surroundings
from serve_app.launch.terminal import Terminal, write_line
from serve_app.launch.tls import WatchedKeyPair
from serve_app.launch.update import Update
from serve_app.system.cpu_priority import yield_cpu

T = TypeVar("T")

_POLL_S = 0.25
_ANSWER_S = 10.0  # how long Ray may take to answer a query
_FIRST_TOKEN_S = 150.0
_INTERRUPTED = 130  # the exit status that shells report for SIGINT
_MEMORY = (
    "Ray's memory monitor is off, because it kills serving processes when any process fills the memory; the kernel's "
    "OOM killer stays on (RAY_memory_monitor_refresh_ms=250 turns Ray's on)"
)


def launch(source: ConfigSource) -> int:
    """Serve `source` until a signal and return the exit status. Call it in the main thread."""
    started = time.monotonic()
    try:
        check_surroundings(Path(ray_temporary_folder()))
        # In /tmp because HAProxy's socket is in this folder, and a socket's path must be short.
        with tempfile.TemporaryDirectory(prefix="serve-app-", dir="/tmp", ignore_cleanup_errors=True) as scratch:
            return _prepare(source, Path(scratch), started).run()
    except (ConfigError, OSError) as error:
        _complain(str(error))
        return 2


def _prepare(source: ConfigSource, scratch: Path, started: float) -> "_Launch":
    """Do everything that comes before the start.

    Raises `ConfigError`, and `OSError` if `scratch` cannot be written.
    """
    bypass_proxies()
    export(launcher_environment(scratch))
    internal_key = write_internal_key(scratch / INTERNAL_KEY)
    try:
        target = read_config(source, scratch)
        check_port(target.host, target.port)
        key_pair = _key_pair_for_haproxy(scratch, target)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    haproxy.write_additions(scratch, target.ours)
    yield_cpu()  # everything that Ray starts inherits this, except for the engines' threads
    return _Launch(source, target, started, scratch, internal_key, key_pair)


class _Launch:
    """One run: `serve run` in the main thread, and a watcher thread."""

    def __init__(
        self,
        source: ConfigSource,
        target: ConfigFile,
        started: float,
        scratch: Path,
        internal_key: str,
        key_pair: WatchedKeyPair | None,
    ) -> None:
        self._source = source
        self._key_pair = key_pair
        self._scratch = scratch
        self._internal_key = internal_key
        self._ending = Ending(lambda: self._target, self._say)
        self._update = Update(source, target, scratch, self._say, self._ending.ingresses)
        self._started = started
        self._failure: str | None = None
        self._status = 0
        self._rays = BoundedCalls(self._say)
        self._node = NodeWatch(self._lose, self._say)
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._drained = False

    def run(self) -> int:
        """Run the server and return the exit status.

        0 after a signal, 1 for a failed start, 2 if this machine does not meet the requirements.
        """
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
                self._fail(f"{self._source}: {error}", 2)
            except Exception as error:
                self._fail(f"the start failed: {first_line(error)} (logs: {logs_folder()})")
            if not self._stopping.is_set():
                self._fail(f"Ray Serve ended by itself (logs: {logs_folder()})")
        if self._failure is not None:
            _complain(self._failure)
        return self._status

    def _serve(self) -> None:
        """Start Ray and the application.

        Returns, or raises `KeyboardInterrupt` or `SystemExit`, at the end.
        """
        start_node()
        self._node.start()
        signal.signal(signal.SIGTERM, self._stop)  # ray.init replaces the handler
        check_gpus(self._target)
        if self._target.ours:
            load_application()
        import ray
        from ray.serve import scripts  # imported while the node's first processes start

        if not memory_monitor_enabled():
            self._say(_MEMORY)
        self._say(f"Ray is up; deploying {self._source}")
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        self._watcher.start()
        config = self._scratch / "config.yaml"
        write_for_ray(self._target, config)
        scripts.run.main([str(config)], standalone_mode=False)
        self._node.close()
        ray.shutdown()

    def _fail(self, failure: str, status: int = 1) -> None:
        """Set the failure message and exit status, unless already set."""
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
        """End every process below this one, then this one, without a drain."""
        self._say(said)
        self._node.close()
        _exit(self._scratch, status)

    def _lose(self, what: str, can_drain: bool) -> None:
        """Drain without the lost part of Ray, and exit: Ray can no longer shut down normally."""
        self._say(what)
        if can_drain:
            self._ending.drain_without_ray()
        _exit(self._scratch, 1)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        """Signal handler.

        The first signal drains, or ends a start; `_end_at_once` handles a second SIGINT.
        """
        if self._drained:
            raise KeyboardInterrupt
        if self._stopping.is_set():
            return
        self._stopping.set()
        if not self._watcher.is_alive():
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """Wait for the first token or a failure, then for signals; drain; end `serve run`.

        Runs in a thread beside `serve run`.
        """
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
        self._drained = True
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGTERM)

    def _wait_for_first_token(self) -> str | None:
        """Return the model's name; None after a signal. Raises `DeploymentError`, Ray's errors."""
        from serve_app.serving.gpus import GpuReports

        reports = GpuReports(self._say)
        while not self._stopping.is_set():
            try:
                self._rays.call(reports.look, _ANSWER_S, self._stopping.is_set)
                ask = partial(served_model, self._target, self._internal_key)
                if (model := self._rays.call(ask, _FIRST_TOKEN_S, self._stopping.is_set)) is not None:
                    return model
            except TimeoutError:
                pass  # not ready yet
            self._stopping.wait(_POLL_S)
        return None

    def _look_after(self, model: str) -> None:
        """Monitor the server until a signal, then drain.

        Errors in the operator's files or in Ray do not end the server here.
        """
        from serve_app.launch.watch import Watch

        # Created before the server is reported ready, so that later deaths are not taken for
        # earlier ones.
        watch = Watch(self._target.url, self._say, self._stopping.is_set)
        self._rays.attempt("the ingresses", self._ending.ingresses, None, 2 * _ANSWER_S)
        wants_key = any(settings.ingress.keys_file is not None for settings in self._target.ours.values())
        pages = welcome(self._target.url, model, self._internal_key, wants_key=wants_key)
        self._say(f"ready: {model} has served its first token\n{pages}")
        threading.Thread(target=self._update.follow, args=(self._stopping,), daemon=True).start()
        kept = KeptFolder(self._scratch, self._say)
        while not self._stopping.wait(_POLL_S):
            if self._key_pair is not None and (news := self._see("the certificate", self._key_pair.look)) is not None:
                self._say(news)
            self._see(f"the files in {self._scratch}", kept.look)
            if (lost := self._see("cannot check the server", watch.look)) is not None:
                self._fail(lost)
                return
        self._ending.drain()

    def _see(self, what: str, look: Callable[[], T]) -> T | None:
        """Return the result of `look`. On an error, print it and return None."""
        try:
            return look()
        except Exception as error:
            self._rays.report(what, error)
            return None

    @property
    def _target(self) -> ConfigFile:
        return self._update.target

    def _say(self, text: str) -> None:
        write_line(sys.__stdout__, f"serve-app [{time.monotonic() - self._started:5.1f} s] {text}")


def _exit(scratch: Path, status: int) -> NoReturn:
    shutil.rmtree(scratch, ignore_errors=True)
    kill_descendants()
    os._exit(status)


def _key_pair_for_haproxy(scratch: Path, target: ConfigFile) -> WatchedKeyPair | None:
    """Return None if TLS is off or Ray's own proxy terminates it. Raises `ConfigError`."""
    return WatchedKeyPair(target.key_pair, scratch) if target.key_pair is not None and haproxy_enabled() else None


def _complain(text: str) -> None:
    write_line(sys.stderr, f"serve-app: {' '.join(text.split())}")
