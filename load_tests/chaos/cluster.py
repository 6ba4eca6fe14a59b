"""Starts four Ray nodes on one machine: `python -m load_tests.chaos.cluster`.

The head runs Serve's controller, the proxy and the ingress; the other three run the engine
replicas. Prints the cluster's address when it is up. SIGTERM ends the nodes.
"""

import signal
import threading

from ray.cluster_utils import Cluster

ENGINE_NODES = 3
_STORE_BYTES = 80 * 2**20
_NODE = {"num_cpus": 1, "object_store_memory": _STORE_BYTES, "node_ip_address": "127.0.0.1"}


def main() -> None:
    """Start the nodes, wait for SIGTERM, stop them."""
    done = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: done.set())
    head = {**_NODE, "include_dashboard": False, "resources": {"front": 1}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(ENGINE_NODES):
        # Any of them has room for every replica: those of a lost node are restarted on the others.
        cluster.add_node(**_NODE, resources={"engine": ENGINE_NODES})
    print(f"cluster at {cluster.address}", flush=True)
    done.wait()
    cluster.shutdown()


if __name__ == "__main__":
    main()
