"""What Ray does not document and we use, read from Ray 2.60.0.

To be read again when the pin in pyproject.toml moves. What must be replaced before Ray starts is in
`launch/ray_node.py`.

What is used: `ray.serve._private.replica.add_port_to_grpc_server` (replaced), the controller's client
(`ray.serve.context._get_global_client`) with its `deploy_apps`, `get_serve_details` and `http_config`
and the controller's `_all_running_replicas`, and `DeploymentHandle._init`; Ray's table of actors
(`ray._private.state.actors`) and client of the GCS
(`ray._private.worker.global_worker.gcs_client`); and the class of Serve's HAProxy manager, whose `ready` is replaced,
with its `_haproxy` and `_reload_lock`.
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
"""Between two attempts."""


def node_address() -> str:
    """The address of the Ray node that this process runs on.

    `serve-app serve` gives its node the address 127.0.0.1, so that nothing can be reached from elsewhere; in a cluster
    of several nodes it is the address by which the others know the node.
    """
    return str(ray.util.get_node_ip_address())


def bind_replica_port_to_node() -> None:
    """Let this replica's port for calls from other deployments listen on its node's address only.

    Ray opens it on all interfaces right after the constructor of the deployment's class has run, without an option to
    change that, and what arrives there is unpickled. Call this in the constructor.
    """
    add_port = ray_replica.add_port_to_grpc_server

    def add_node_port(server: Any, address: str) -> Any:
        return add_port(server, address.replace("[::]", node_address()))

    ray_replica.add_port_to_grpc_server = add_node_port


async def running_replicas() -> dict[Any, list[Any]]:
    """The running replicas of every deployment, as Serve's controller knows them. Raises `ray.exceptions.RayError`.

    Keys have `name` and `app_name`, values `replica_id`, `replica_metadata` and `node_ip`. An ingress does not learn of
    the other ingress replicas in any other way.
    """
    running = await _get_global_client()._controller._all_running_replicas.remote()
    return dict(running)


def http_host() -> str:
    """The address on which Serve listens for HTTP. Blocks."""
    return str(_get_global_client().http_config.host)


def has_certificate() -> bool:
    """Whether Serve was told to speak HTTPS: Ray's proxies can, HAProxy as Ray configures it cannot. Blocks."""
    return _get_global_client().http_config.ssl_certfile is not None


def deploy_again(schema: ServeDeploySchema) -> None:
    """Have Serve change what `schema` changes, without waiting: `serve.run` takes no config file.

    Raises `ConfigError` if `schema` has no application that serves now: Serve would delete them all at once.
    """
    serving = {name for name, application in serve.status().applications.items() if application.status == "RUNNING"}
    if serving and serving.isdisjoint(application.name for application in schema.applications):
        raise ConfigError(f"applications: at least one running application must remain ({', '.join(sorted(serving))})")
    _get_global_client().deploy_apps(schema, _blocking=False)


def gcs_answers(timeout_s: float) -> bool:
    """Whether the GCS of the cluster that this process is connected to answers in time; True without one. Blocks."""
    if not ray.is_initialized():
        return True
    try:
        ray._private.worker.global_worker.gcs_client.internal_kv_exists(b"serve_app", None, timeout=timeout_s)
    except Exception:  # of Ray's, whatever it is
        return False
    return True


def gpus_wanted() -> float:
    """GPUs that all the replicas take that Serve keeps at present, or waits for. Blocks; raises what Ray raises."""
    client = _get_global_client(raise_if_no_controller_running=False)
    applications = {} if client is None else client.get_serve_details()["applications"]
    deployments = [item for application in applications.values() for item in application["deployments"].values()]
    return sum((item["required_resources"].get("GPU", 0.0) * item["target_num_replicas"] for item in deployments), 0.0)


def use_in_any_thread(handle: DeploymentHandle[Any]) -> None:
    """Let `handle` be called in a thread without an event loop: on Ray's fast path it would want to live on one."""
    if not handle.is_initialized:
        handle._init(_run_router_in_separate_loop=True)


@dataclass(frozen=True, slots=True)
class Actor:
    """An actor as Ray's table has it. `crashed`: its process or node ended without being told to, the last time."""

    actor_id: str
    class_name: str
    pid: int
    dead: bool
    restarts: int
    crashed: bool
    cause: str


def actors() -> list[Actor]:
    """Every actor of the cluster that this process is connected to, dead ones too."""
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
    """Have Serve's HAProxy manager start HAProxy again as soon as it has ended. For the controller's process.

    Left to itself, Ray notices after three health checks and replaces the manager, which takes half a minute.
    `RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH` names this function to Ray.
    """
    _haproxy_manager().ready = _ready_and_watching


def _haproxy_manager() -> Any:
    """The class of which the controller makes an actor."""
    return ray_haproxy.HAProxyManager.__ray_metadata__.modified_class


async def _ready_and_watching(manager: Any) -> str:
    """`HAProxyManager.ready`, which the controller calls in the manager's process; there it is Ray's own."""
    answer = await _haproxy_manager().ready(manager)
    if not hasattr(manager, "watching_haproxy"):
        log_to_terminal()
        manager.watching_haproxy = tasks = LastingTasks()
        tasks.start("haproxy", partial(_watch_haproxy, manager))
        tasks.start("frozen haproxy", partial(_end_frozen_haproxy, manager))
    return str(answer)


async def _watch_haproxy(manager: Any) -> None:
    """Until cancelled: start HAProxy where it has ended, or where its socket, by which Ray knows it, is gone."""
    while True:
        await asyncio.sleep(_LOOK_AT_HAPROXY_S)
        if _has_haproxy(manager):
            continue
        async with manager._reload_lock:
            if not _has_haproxy(manager):
                try:
                    await _start_haproxy(manager._haproxy)
                except Exception as error:  # whatever it is: the launcher ends the server if it lasts
                    logger.error("HAProxy did not start: %s", one_line(error))
                    await asyncio.sleep(_START_HAPROXY_S)


async def _end_frozen_haproxy(manager: Any) -> None:
    """Until cancelled: kill a HAProxy that is frozen. It would go on to take every second connection, or none could."""
    check = FrozenCheck()
    while True:
        await asyncio.sleep(_LOOK_AT_HAPROXY_S if check.unanswered else _ASK_HAPROXY_S)
        for pid in await asyncio.to_thread(check.look, Path(manager._haproxy.cfg.socket_path)):
            logger.error("HAProxy (pid %d) is frozen: it has not answered for 2 s, and is ended", pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _has_haproxy(manager: Any) -> bool:
    api = manager._haproxy
    # `_proc` is None once Ray has stopped it.
    return api._proc is None or (api._is_running() and Path(api.cfg.socket_path).exists())


async def _start_haproxy(api: Any) -> None:
    """A new process; one that still runs finishes its connections."""
    old, is_running = api._proc, api._is_running()
    what = "lost its socket" if is_running else f"ended with status {old.returncode}"
    logger.warning("HAProxy (pid %d) has %s: restarting it", old.pid, what)
    api._initialize_directories_and_error_files()
    api._generate_config_file_internal()
    with suppress(FileNotFoundError):
        os.unlink(api.cfg.server_state_file)  # of the last reload, which may be long ago
    api._proc = await api._start_and_wait_for_haproxy(*(("-sf", str(old.pid)) if is_running else ()))
    if is_running:
        api._old_procs.append(old)
