"""Real servers that speak HTTPS: by HAProxy, whose certificate changes under a stream, and by Ray's
own proxy."""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve_app.environment import FAST_PATH_ENVIRONMENT
from serve_app.launch.ports import free_port
from tests.certificates import trusting, write_certificate
from tests.serving.conftest import DEFAULT_PATH, Server, launch, write_config
from tests.serving.leaks import shown_by

pytestmark = pytest.mark.cluster


@pytest.fixture
def config(tiny_folder: Path, tmp_path: Path) -> Path:
    """With a certificate, `server.crt` and `server.key` beside it."""
    engine = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_gib": 0.05, "num_threads": 1}
    args = {"model": str(tiny_folder), "served_model_name": "tiny", "device": "cpu", "engine": engine}
    path = write_config(tmp_path, args, free_port())
    data = yaml.safe_load(path.read_text())
    certificate, key = tmp_path / "server.crt", tmp_path / "server.key"
    data["http_options"] |= {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    write_certificate(certificate, key)
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.fixture
def serve(config: Path) -> Any:
    servers: list[Server] = []

    def serve(environment: dict[str, str], **how: Any) -> Server:
        port = yaml.safe_load(config.read_text())["http_options"]["port"]
        servers.append(Server(launch(config, environment, **how), f"https://127.0.0.1:{port}"))
        return servers[0]

    yield serve
    for server in servers:
        if server.process.poll() is None:
            server.stop()
        else:
            server.wait_stopped()


def ask(server: Server, certificate: Path) -> str:
    body = {"prompt": "Once", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    with httpx.Client(verify=trusting(certificate), timeout=60) as client:
        answer = client.post(f"{server.url}/v1/completions", json=body)
    assert answer.json()["usage"]["completion_tokens"] == 4
    return str(answer.json()["choices"][0]["text"])


def test_haproxy_ends_tls_and_takes_a_new_certificate_under_a_stream(
    serve: Callable[..., Server], config: Path, tmp_path: Path
) -> None:
    server, certificate, first = serve({}), tmp_path / "server.crt", tmp_path / "first.crt"
    server.wait_ready()
    assert f"curl -k {server.url}/v1/chat" in server.line_with("  curl ")
    first.write_bytes(certificate.read_bytes())
    private = (tmp_path / "server.key").read_text().splitlines()
    text = ask(server, first)
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https:", "http:") + "/health/ready", timeout=20)
    body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(verify=trusting(first), timeout=60) as client,
        client.stream("POST", f"{server.url}/v1/completions", json=body) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        write_certificate(certificate, tmp_path / "server.key")
        server.said("new connections get it")
        assert ask(server, certificate) == text
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(server.url, verify=trusting(first))
        assert "data: [DONE]" in list(lines)
    private += (tmp_path / "server.key").read_text().splitlines()
    secrets = [line for line in private if not line.startswith("-----")]
    assert len(set(secrets)) >= 4
    assert not any(secret in text for text in shown_by(server) for secret in secrets)
    assert server.stop() == (0, [])
    assert not [line for line in server.lines if "not ready" in line]


@pytest.mark.slow
def test_rays_own_proxy_ends_tls_too(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(DEFAULT_PATH)
    server.wait_ready()
    ask(server, tmp_path / "server.crt")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(server.url, verify=ssl.create_default_context())


@pytest.mark.slow
def test_haproxy_without_the_launcher_is_refused_a_certificate(serve: Callable[..., Server]) -> None:
    ray = {"RAY_ADDRESS": "local", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    server = serve({**FAST_PATH_ENVIRONMENT, **ray}, command=("serve", "run"))
    server.said("HAProxy started by Ray supports no TLS", 150)
