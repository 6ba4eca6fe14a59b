"""GPUs that replicas wait for: refused where none will come, and said where some are lacking."""

import time
from collections.abc import Callable

from serve_app.errors import ConfigError
from serve_app.launch.config_file import ConfigFile

_PERIOD_S = 30.0


def check_gpus(target: ConfigFile) -> None:
    """Raise `ConfigError` if replicas need GPUs and there is none: to the launcher's one node none will come."""
    from serve_app.serving.gpus import cluster_gpus

    if any(settings.device == "cuda" for settings in target.ours.values()) and not cluster_gpus():
        raise ConfigError(
            "setting `device`: cuda, but Ray finds no GPU on this machine: see `nvidia-smi`, and whether "
            "CUDA_VISIBLE_DEVICES hides it"
        )


class GpuReports:
    """Says, at once and every 30 s, what is waited for. Ray does not."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` prints a line."""
        self._say = say
        self._next = 0.0

    def look(self, target: ConfigFile) -> None:
        """To be called while applications start. Raises whatever Ray raises."""
        from serve_app.serving.gpus import lacking_gpus

        if (now := time.monotonic()) >= self._next:
            self._next = now + _PERIOD_S
            if (lack := lacking_gpus(target.ours.values())) is not None:
                self._say(lack)
