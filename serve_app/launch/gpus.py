"""GPUs that replicas need: refused where none will come."""

from serve_app.errors import ConfigError
from serve_app.launch.config_file import ConfigFile


def check_gpus(target: ConfigFile) -> None:
    """Raise `ConfigError` if replicas need GPUs and there is none: to the launcher's one node none will come."""
    from serve_app.serving.gpus import cluster_gpus

    if any(settings.device == "cuda" for settings in target.ours.values()) and not cluster_gpus():
        raise ConfigError(
            "setting `device`: cuda, but Ray finds no GPU on this machine: see `nvidia-smi`, and whether "
            "CUDA_VISIBLE_DEVICES hides it"
        )
