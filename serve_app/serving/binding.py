"""Which addresses Ray's processes listen on. Ray opens some on every interface; here they keep to the node's.

`serve-app serve` gives its node the address 127.0.0.1, so that nothing can be reached from elsewhere; in a cluster of
several nodes it is the address by which the others know the node.
"""

from typing import Any

import ray.util
from ray.serve._private import replica as ray_replica


def node_address() -> str:
    """The address of the Ray node that this process runs on."""
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
