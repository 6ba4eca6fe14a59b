"""Updates a running server when its config file is read again.

An invalid file, or an error of Ray's controller, changes nothing in the running server. Otherwise
the deployment's progress is reported until it ends.
"""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from serve_app.errors import ConfigError
from serve_app.launch import haproxy
from serve_app.launch.bounded import BoundedCalls, first_line
from serve_app.launch.config_file import ConfigFile, read_config
from serve_app.launch.config_source import ConfigSource
from serve_app.launch.deployment import DeploymentError, is_running
from serve_app.launch.gpus import check_gpus

if TYPE_CHECKING:
    from serve_app.serving.gpus import GpuReports

_POLL_S = 0.25
# How long Ray may take to answer a query, or to accept a new deployment.
_ANSWER_S, _DEPLOY_S = 10.0, 60.0


class Update:
    """The most recently requested deployment."""

    def __init__(
        self,
        source: ConfigSource,
        target: ConfigFile,
        scratch: Path,
        say: Callable[[str], None],
        ended: Callable[[], object],
    ) -> None:
        """`target`: the current config. `scratch`: the folder of HAProxy's files.

        `say` prints a line. `ended`: called when an update has succeeded or failed.
        """
        self._source = source
        self._scratch = scratch
        self._say = say
        self._ended = ended
        self._is_asked_for = False
        self._reports: GpuReports | None = None
        """GPU reports of the deployment in progress, None if there is none."""
        self.target = target

    def ask(self) -> None:
        """Request an update. Returns at once; may be called in a signal handler."""
        self._is_asked_for = True

    def follow(self, stopping: threading.Event) -> None:
        """Run updates until `stopping`. Call this in its own thread: Ray may block for long."""
        rays = BoundedCalls(self._say)
        while not stopping.wait(_POLL_S):
            self.look(rays, stopping.is_set)

    def look(self, rays: BoundedCalls, given_up: Callable[[], bool]) -> None:
        """Begin a requested update, or check the progress of the current one. Prints errors.

        A request remains until its update has begun.
        """
        if self._is_asked_for:
            rays.attempt("the update", self._begin, None, _DEPLOY_S, given_up)
        elif self._reports is not None:
            rays.attempt("the update", partial(self._see, self._reports), None, 3 * _ANSWER_S, given_up)

    def _begin(self) -> None:
        """Read the config file again and make Serve apply the changes.

        Knobs change at once; replicas are replaced one after another. Nothing changes if the file
        is invalid or Ray fails.
        """
        from serve_app.serving.gpus import GpuReports
        from serve_app.serving.ray_patches import deploy_again

        self._is_asked_for = False
        before = self.target
        try:
            target = read_config(self._source, self._scratch)
            if (target.host, target.port, target.key_pair) != (before.host, before.port, before.key_pair):
                raise ConfigError("http_options: host, port and files cannot change while the server runs")
            check_gpus(target)
            haproxy.write_additions(self._scratch, target.ours)
            deploy_again(target.schema)
        except Exception as error:
            reason = str(error) if isinstance(error, ConfigError) else f"the update failed: {first_line(error)}"
            self._say(f"{self._source}: {reason}; nothing has changed")
            haproxy.write_additions(self._scratch, before.ours)
            return
        self.target = target
        self._reports = GpuReports(self._say)
        self._say(f"deploying {self._source} again")

    def _see(self, reports: "GpuReports") -> None:
        """Check whether the deployment has ended, and print the result.

        If it failed, the old replicas continue to serve. Raises Ray's errors.
        """
        reports.look()
        try:
            if not is_running(self.target.applications):
                return
        except DeploymentError as error:
            self._say(str(error))
        else:
            self._say("deployed")
        self._reports = None
        self._ended()
