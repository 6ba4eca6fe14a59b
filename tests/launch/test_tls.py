"""TLS at a real HAProxy, started by our wrapper with a configuration of the form of Ray's."""

import http.client
import os
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from serve_app.errors import ConfigError
from serve_app.launch import haproxy
from serve_app.launch.ports import free_port
from serve_app.launch.tls import HAPROXY_SOCKET, KeyPair, WatchedKeyPair
from serve_app.system.http_client import fetch
from tests.certificates import trusting, write_certificate
from tests.serving.conftest import wait_for

CONFIG = """
global
    stats socket {folder}/node/{socket} mode 666 level admin expose-fd listeners
defaults
    mode http
    timeout connect 9s
    timeout client 99s
    timeout server 99s
frontend prometheus
    bind :{others[0]}
frontend http_frontend
    bind {host}:{port}
    default_backend behind
backend behind
    server one 127.0.0.1:{behind}
listen stats
    bind *:{others[1]}
"""


class Handler(BaseHTTPRequestHandler):
    """Tells the scheme that it was told of; `/slow` ends when it may."""

    may_end = threading.Event()

    def do_GET(self) -> None:
        body = self.headers.get("x-forwarded-proto", "none").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(2 * len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
        if self.path == "/slow":
            self.may_end.wait(60)
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """As the launcher's: a socket's path must be short."""
    with tempfile.TemporaryDirectory(prefix="serve-app-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def behind() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@dataclass
class Proxy:
    folder: Path
    port: int
    others: tuple[int, int]
    process: subprocess.Popen[bytes]


@pytest.fixture
def pair(tmp_path: Path) -> KeyPair:
    files = KeyPair(tmp_path / "server.crt", tmp_path / "server.key")
    write_certificate(files.certificate, files.key)
    return files


def start(folder: Path, behind: int, host: str = "127.0.0.1") -> Proxy:
    port, others = free_port(), (free_port(), free_port())
    config = folder / "haproxy.cfg"
    (folder / "node").mkdir()
    config.write_text(
        CONFIG.format(folder=folder, socket=HAPROXY_SOCKET, host=host, port=port, behind=behind, others=others)
    )
    process = subprocess.Popen([haproxy.write_wrapper(folder), "-db", "-f", config])

    def listens() -> bool:
        assert process.poll() is None
        with closing(socket.socket()) as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_for(listens, "HAProxy listens")
    return Proxy(folder, port, others, process)


@pytest.fixture
def proxy(pair: KeyPair, short_folder: Path, behind: int) -> Iterator[tuple[Proxy, WatchedKeyPair]]:
    watched = WatchedKeyPair(pair, short_folder)
    proxy = start(short_folder, behind)
    yield proxy, watched
    proxy.process.kill()
    proxy.process.wait(20)


def connect(proxy: Proxy, certificate: Path) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection("127.0.0.1", proxy.port, timeout=30, context=trusting(certificate))


def said(watched: WatchedKeyPair) -> str:
    """What there is to say once the change was seen twice."""
    watched.look()
    return watched.look() or ""


def test_it_is_ended_and_told_on(proxy: tuple[Proxy, WatchedKeyPair], pair: KeyPair) -> None:
    running, watched = proxy
    with closing(connect(running, pair.certificate)) as client:
        client.request("GET", "/")
        assert client.getresponse().read() == b"httpshttps"
    assert fetch(f"https://127.0.0.1:{running.port}/", timeout_s=30, verify=False) == b"httpshttps"
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        fetch(f"https://127.0.0.1:{running.port}/", timeout_s=30)
    assert said(watched) == ""


def test_a_new_certificate_is_taken_over_and_no_stream_is_cut(
    proxy: tuple[Proxy, WatchedKeyPair], pair: KeyPair, tmp_path: Path
) -> None:
    running, watched = proxy
    first = tmp_path / "first.crt"
    first.write_bytes(pair.certificate.read_bytes())
    Handler.may_end.clear()
    with closing(connect(running, first)) as slow:
        slow.request("GET", "/slow")
        stream = slow.getresponse()
        assert stream.read(5) == b"https"
        write_certificate(pair.certificate, pair.key)
        assert said(watched) == f"{pair.certificate} was read again: new connections get it"
        with closing(connect(running, pair.certificate)) as client:
            client.request("GET", "/")
            assert client.getresponse().status == 200
        with closing(connect(running, first)) as client, pytest.raises(ssl.SSLCertVerificationError):
            client.request("GET", "/")
        Handler.may_end.set()
        assert stream.read() == b"https"
    assert watched.look() is None


def test_a_pair_that_does_not_fit_changes_nothing(proxy: tuple[Proxy, WatchedKeyPair], pair: KeyPair) -> None:
    running, watched = proxy
    good = {path: path.read_bytes() for path in (pair.certificate, pair.key)}
    write_certificate(pair.certificate, running.folder / "other.key")
    assert watched.look() is None, "the key may be about to follow"
    told = watched.look() or ""
    assert "cannot be used: KEY_VALUES_MISMATCH; the previous certificate stays in use" in told
    assert watched.look() is None
    pair.key.unlink()
    assert "No such file or directory; the previous certificate stays" in said(watched)
    copy = (running.folder / "tls.pem").read_text()
    assert all(block.decode().split()[2] in copy for block in good.values())
    for path, content in good.items():
        path.write_bytes(content)
    assert "was read again" in said(watched)


def test_a_haproxy_that_is_gone_is_told_of(pair: KeyPair, short_folder: Path) -> None:
    watched = WatchedKeyPair(pair, short_folder)
    write_certificate(pair.certificate, pair.key)
    assert "the previous certificate stays in use" in said(watched)


def test_a_haproxy_that_was_away_gets_the_new_certificate(pair: KeyPair, short_folder: Path, behind: int) -> None:
    watched = WatchedKeyPair(pair, short_folder)
    proxy = start(short_folder, behind)
    try:
        address = short_folder / "node" / HAPROXY_SOCKET
        hidden = address.rename(short_folder / "hidden")
        write_certificate(pair.certificate, pair.key)
        assert "HAProxy does not run; the previous certificate stays in use" in said(watched)
        assert said(watched) == "", "reported once"
        hidden.rename(address)
        assert "was read again" in (watched.look() or "")
        with closing(connect(proxy, pair.certificate)) as client:
            client.request("GET", "/")
            assert client.getresponse().status == 200
        assert said(watched) == ""
    finally:
        proxy.process.kill()
        proxy.process.wait(20)


def test_files_that_never_end_are_refused(pair: KeyPair, short_folder: Path, tmp_path: Path) -> None:
    """Nothing writes to a named pipe, and a device has no end: reading either would stop the
    launcher for good."""
    watched = WatchedKeyPair(pair, short_folder)
    good = pair.key.read_bytes()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"cannot be used: is not a regular file$"):
            WatchedKeyPair(KeyPair(pair.certificate, path), short_folder)
        pair.key.unlink()
        pair.key.symlink_to(path)
        assert "is not a regular file; the previous certificate stays in use" in said(watched)
    with pytest.raises(ConfigError, match="cannot be used"):
        WatchedKeyPair(KeyPair(Path("a\0b"), pair.key), short_folder)
    pair.key.unlink()
    pair.key.write_bytes(good)
    assert "HAProxy does not run" in said(watched)


def test_what_cannot_be_used_is_refused_in_one_line(pair: KeyPair, short_folder: Path) -> None:
    write_certificate(pair.certificate, pair.key, password=b"a secret")
    with pytest.raises(ConfigError, match=r"certificate and key \(.*\) cannot be used") as refused:
        WatchedKeyPair(pair, short_folder)
    assert "\n" not in str(refused.value)
    pair.key.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be used"):
        WatchedKeyPair(pair, short_folder)
    write_certificate(pair.certificate, pair.key)
    WatchedKeyPair(pair, short_folder)
    assert (short_folder / "tls.pem").stat().st_mode & 0o077 == 0


def test_only_the_ports_that_are_for_this_machine_are_bound_to_it(short_folder: Path, behind: int) -> None:
    """The door stays where the config file puts it, also on all addresses."""
    proxy = start(short_folder, behind, host="*")
    proxy.process.kill()
    proxy.process.wait(20)
    binds = [line.split()[1] for line in (short_folder / "haproxy.cfg").read_text().splitlines() if "bind" in line]
    assert binds == [f"127.0.0.1:{proxy.others[0]}", f"*:{proxy.port}", f"127.0.0.1:{proxy.others[1]}"]
