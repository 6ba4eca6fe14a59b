"""Checks the GPUs and other Ray resources that replicas need, and refuses what is not available."""

from collections.abc import Iterator, Mapping
from typing import Any

from serve_app.errors import ConfigError
from serve_app.launch.config_file import ConfigFile

_KEYS = {"num_gpus": "GPU", "num_cpus": "CPU", "memory": "memory"}
"""Keys of `ray_actor_options` -> Ray's resource names."""


def check_gpus(target: ConfigFile) -> None:
    """Raise `ConfigError` if a replica needs more than this machine has.

    The launcher's Ray has one node, so no more resources will come. Several replicas together may
    need more GPUs than there are: those without a GPU wait.
    """
    from serve_app.serving.gpus import cluster_gpus, cluster_resources

    if any(settings.device == "cuda" for settings in target.ours.values()) and not cluster_gpus():
        raise ConfigError(
            "setting `device`: cuda, but Ray finds no GPU on this machine: see `nvidia-smi`, and whether "
            "CUDA_VISIBLE_DEVICES hides it"
        )
    wanted = [
        (deployment, key, name, amount)
        for deployment, options in _actor_options(target)
        for key, name, amount in _resources(options)
        if amount is not None
    ]
    there = cluster_resources() if wanted else {}
    for deployment, key, name, amount in wanted:
        if amount > there.get(name, 0.0):
            raise ConfigError(
                f"deployment {deployment}: `ray_actor_options.{key}` is {amount:g}, but Ray finds "
                f"{there.get(name, 0.0):g} {name} on this machine"
            )


def _resources(options: Mapping[str, Any]) -> Iterator[tuple[str, str, float | None]]:
    """Yield (key, Ray's name, amount) of each resource in the options."""
    for key, name in _KEYS.items():
        yield key, name, options.get(key)
    for name, amount in (options.get("resources") or {}).items():
        yield f"resources.{name}", name, amount


def _actor_options(target: ConfigFile) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (deployment name, actor options) for those that the file sets on our deployments."""
    for application in target.schema.applications:
        if application.name in target.ours:
            for deployment in application.deployments:
                options = deployment.model_dump(exclude_unset=True).get("ray_actor_options")
                if isinstance(options, Mapping):
                    yield deployment.name, options
