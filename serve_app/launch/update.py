"""A second or later deployment, by a config file that was read again: refused in a line, or followed to its end.

Whatever is wrong with the file, or with Ray's controller, changes nothing of the server that runs.
"""

from collections.abc import Callable
from pathlib import Path

from serve_app.errors import ConfigError
from serve_app.launch import haproxy
from serve_app.launch.bounded import one_line
from serve_app.launch.config_file import ConfigFile, read_config
from serve_app.launch.deployment import DeploymentError, is_running
from serve_app.launch.gpus import GpuReports, check_gpus


class Update:
    """The deployment that was asked for last."""

    def __init__(self, config_path: Path, target: ConfigFile, scratch: Path, say: Callable[[str], None]) -> None:
        """`target`: what the file says now. `scratch`: the folder of HAProxy's files. `say` prints a line."""
        self._config_path = config_path
        self._scratch = scratch
        self._say = say
        self._gpus = GpuReports(say)
        self.target = target

    def begin(self) -> bool:
        """Read the config file again and let Serve change what it must: knobs at once, replicas one after another.

        False if nothing changes, because the file is refused or Ray fails.
        """
        from serve_app.serving.ray_patches import deploy_again

        before = self.target
        try:
            target = read_config(self._config_path)
            if (target.host, target.port, target.key_pair) != (before.host, before.port, before.key_pair):
                raise ConfigError("http_options: host, port and files cannot change while the server runs")
            check_gpus(target)
            bound_requests(self._scratch, target)
            deploy_again(target.schema)
        except Exception as error:
            reason = str(error) if isinstance(error, ConfigError) else f"the update failed: {one_line(error)}"
            self._say(f"{self._config_path}: {reason}; nothing has changed")
            bound_requests(self._scratch, before)
            return False
        self.target = target
        self._say(f"deploying {self._config_path} again")
        return True

    def has_ended(self) -> bool:
        """Whether it is over, and say how. If it failed, the old replicas serve on. Raises what Ray raises."""
        self.report_gpus()
        try:
            if not is_running(self.target.applications):
                return False
        except DeploymentError as error:
            self._say(str(error))
        else:
            self._say("deployed")
        return True

    def report_gpus(self) -> None:
        """Say now and then which GPUs are waited for. Raises what Ray raises."""
        self._gpus.look(self.target)


def bound_requests(scratch: Path, target: ConfigFile) -> None:
    """Write the limits on requests for HAProxy. Raises `OSError`."""
    haproxy.write_additions(scratch, target.ours)
