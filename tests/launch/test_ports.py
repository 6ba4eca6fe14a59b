import socket
from pathlib import Path

from serve_app.launch.ports import free_port


def test_no_outgoing_connection_can_take_it() -> None:
    """Seen once: between the launcher's choice and HAProxy's bind, a connection of Ray's own had
    the port."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for _ in range(100):
        port = free_port()
        assert not first <= port <= last
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))
