"""Undocumented parts of Ray that we use, read from Ray 2.60.0.

Read them again when the pin in pyproject.toml changes. Parts that must be replaced before Ray
starts are in `launch/ray_node.py`.

Used: `ray.serve._private.replica.add_port_to_grpc_server` (replaced); the controller's client
(`ray.serve.context._get_global_client`) with `deploy_apps`, `get_serve_details` and `http_config`;
the controller's `_all_running_replicas`; `DeploymentHandle._init`; Ray's table of actors
(`ray._private.state.actors`); the GCS client (`ray._private.worker.global_worker.gcs_client`); the
class of Serve's HAProxy manager with `_haproxy` and `_reload_lock`, and its `ready` (replaced).
"""

import asyncio
import logging
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray._private.state
import ray._private.worker
import ray.util
from ray import serve
from ray.serve._private import haproxy as ray_haproxy
from ray.serve._private import replica as ray_replica
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ServeDeploySchema

from serve_app.errors import ConfigError, one_line
from serve_app.observability.logging import log_to_terminal
from serve_app.serving.frozen import FrozenCheck
from serve_app.system.lasting import LastingTasks

logger = logging.getLogger(__name__)

_LOOK_AT_HAPROXY_S = 0.1
_ASK_HAPROXY_S = 0.5
_START_HAPROXY_S = 1.0
"""Pause between two attempts."""


def node_address() -> str:
    """Return the address of the Ray node that runs this process.

    `serve-app serve` gives its node the address 127.0.0.1, so that other machines cannot connect.
    In a cluster it is the address by which the other nodes know this one.
    """
    return str(ray.util.get_node_ip_address())


def bind_replica_port_to_node() -> None:
    """Make this replica's port for calls from other deployments listen on its node's address only.

    Call this in the constructor of the deployment's class: Ray opens the port right after it. By
    default Ray listens on all interfaces, without an option to change that, and unpickles what
    arrives.
    """
    add_port = ray_replica.add_port_to_grpc_server

    def add_node_port(server: Any, address: str) -> Any:
        return add_port(server, address.replace("[::]", node_address()))

    ray_replica.add_port_to_grpc_server = add_node_port


async def running_replicas() -> dict[Any, list[Any]]:
    """Return the running replicas by deployment, from Serve's controller.

    Keys have `name` and `app_name`; values have `replica_id`, `replica_metadata` and `node_ip`. An
    ingress has no other way to find other ingress replicas. Raises `ray.exceptions.RayError`.
    """
    running = await _get_global_client()._controller._all_running_replicas.remote()
    return dict(running)


def http_host() -> str:
    """Return the address that Serve listens on for HTTP. Blocking."""
    return str(_get_global_client().http_config.host)


def has_certificate() -> bool:
    """Whether Serve is configured for HTTPS. Blocking.

    Ray's proxies support it; HAProxy as Ray configures it does not.
    """
    return _get_global_client().http_config.ssl_certfile is not None


def deploy_again(schema: ServeDeploySchema) -> None:
    """Make Serve apply the changes in `schema`, without waiting. `serve.run` takes no config file.

    Raises `ConfigError` if no running application is in `schema`: Serve would delete all of them at
    once.
    """
    serving = {name for name, application in serve.status().applications.items() if application.status == "RUNNING"}
    if serving and serving.isdisjoint(application.name for application in schema.applications):
        raise ConfigError(f"applications: at least one running application must remain ({', '.join(sorted(serving))})")
    _get_global_client().deploy_apps(schema, _blocking=False)


def gcs_answers(timeout_s: float) -> bool:
    """Whether the GCS of the connected cluster answers in time; True if not connected. Blocking."""
    if not ray.is_initialized():
        return True
    try:
        ray._private.worker.global_worker.gcs_client.internal_kv_exists(b"serve_app", None, timeout=timeout_s)
    except Exception:  # any of Ray's errors
        return False
    return True


def gpus_wanted() -> float:
    """Return the GPUs that all of Serve's target replicas need. Blocking; raises Ray's errors."""
    client = _get_global_client(raise_if_no_controller_running=False)
    applications = {} if client is None else client.get_serve_details()["applications"]
    deployments = [item for application in applications.values() for item in application["deployments"].values()]
    return sum((item["required_resources"].get("GPU", 0.0) * item["target_num_replicas"] for item in deployments), 0.0)


def use_in_any_thread(handle: DeploymentHandle[Any]) -> None:
    """Allow calls of `handle` in a thread without an event loop.

    On Ray's fast path, handles need an event loop by default.
    """
    if not handle.is_initialized:
        handle._init(_run_router_in_separate_loop=True)


@dataclass(frozen=True, slots=True)
class Actor:
    """A row of Ray's table of actors.

    `crashed`: its process or node last ended unexpectedly.
    """

    actor_id: str
    class_name: str
    pid: int
    dead: bool
    restarts: int
    crashed: bool
    cause: str


def actors() -> list[Actor]:
    """Return every actor of the connected cluster, including dead ones."""
    return [_actor(actor_id, row) for actor_id, row in ray._private.state.actors().items()]


def _actor(actor_id: str, row: dict[str, Any]) -> Actor:
    died = row["DeathCause"].actor_died_error_context
    reason = died.DESCRIPTOR.enum_types_by_name["Reason"].values_by_number[died.reason].name
    return Actor(
        actor_id=actor_id,
        class_name=row["ActorClassName"],
        pid=row["Pid"],
        dead=row["State"] == "DEAD",
        restarts=row["NumRestarts"],
        crashed=reason not in ("RAY_KILL", "OUT_OF_SCOPE", "REF_DELETED", "OWNER_DIED"),
        cause=died.error_message or row["DeathCause"].oom_context.error_message,
    )


def keep_haproxy_running() -> None:
    """Make Serve's HAProxy manager restart HAProxy as soon as it ends.

    Call this in the controller's process. By default, Ray notices after three failed health checks
    and replaces the manager, which takes half a minute. `RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH`
    passes this function to Ray.
    """
    _haproxy_manager().ready = _ready_and_watching


def _haproxy_manager() -> Any:
    """Return the class that the controller's HAProxy actor is created from."""
    return ray_haproxy.HAProxyManager.__ray_metadata__.modified_class


async def _ready_and_watching(manager: Any) -> str:
    """Replacement of `HAProxyManager.ready`. The controller calls it in the manager's process.

    There, `HAProxyManager.ready` is still Ray's own function.
    """
    answer = await _haproxy_manager().ready(manager)
    if not hasattr(manager, "watching_haproxy"):
        log_to_terminal()
        manager.watching_haproxy = tasks = LastingTasks()
        tasks.start("haproxy", partial(_watch_haproxy, manager))
        tasks.start("frozen haproxy", partial(_end_frozen_haproxy, manager))
    return str(answer)


async def _watch_haproxy(manager: Any) -> None:
    """Restart HAProxy when it ends, or when its socket, which Ray uses to reach it, is gone.

    Until cancelled.
    """
    while True:
        await asyncio.sleep(_LOOK_AT_HAPROXY_S)
        if _has_haproxy(manager):
            continue
        async with manager._reload_lock:
            if not _has_haproxy(manager):
                try:
                    await _start_haproxy(manager._haproxy)
                except Exception as error:  # any error: the launcher ends the server if it persists
                    logger.error("HAProxy did not start: %s", one_line(error))
                    await asyncio.sleep(_START_HAPROXY_S)


async def _end_frozen_haproxy(manager: Any) -> None:
    """Kill a frozen HAProxy, which could keep receiving every second connection, or all of them.

    Until cancelled.
    """
    check = FrozenCheck()
    while True:
        await asyncio.sleep(_LOOK_AT_HAPROXY_S if check.unanswered else _ASK_HAPROXY_S)
        for pid in await asyncio.to_thread(check.look, Path(manager._haproxy.cfg.socket_path)):
            logger.error("HAProxy (pid %d) is frozen: no answer for 2 s. It is killed and restarted", pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _has_haproxy(manager: Any) -> bool:
    api = manager._haproxy
    # Ray sets `_proc` to None when it stops HAProxy.
    return api._proc is None or (api._is_running() and Path(api.cfg.socket_path).exists())


async def _start_haproxy(api: Any) -> None:
    """Start a new process. An old process that still runs finishes its connections."""
    old, is_running = api._proc, api._is_running()
    what = "lost its socket" if is_running else f"ended with status {old.returncode}"
    logger.warning("HAProxy (pid %d) has %s: restarting it", old.pid, what)
    api._initialize_directories_and_error_files()
    api._generate_config_file_internal()
    with suppress(FileNotFoundError):
        os.unlink(api.cfg.server_state_file)  # left by the last reload, which may be long ago
    api._proc = await api._start_and_wait_for_haproxy(*(("-sf", str(old.pid)) if is_running else ()))
    if is_running:
        api._old_procs.append(old)
