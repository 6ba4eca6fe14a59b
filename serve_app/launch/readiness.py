"""Checks over HTTP, like a client, that the server answers. Uses its own API key.

Does not verify the certificate, which is for the server's public name rather than the local
address.
"""

import json
from pathlib import Path
from typing import Any

from serve_app.environment import haproxy_enabled, haproxy_metrics_port, proxies_are_named
from serve_app.launch import haproxy
from serve_app.launch.config_file import ConfigFile
from serve_app.launch.deployment import is_running
from serve_app.system.http_client import fetch
from serve_app.tenants.keys import new_key

_TIMEOUT_S = 60.0


def write_internal_key(path: Path) -> str:
    """Create an API key for this run and write it to `path`.

    Only this user, and so the ingress, can read it.
    """
    key = new_key()
    path.touch(0o600)
    path.write_text(key)
    return key


def first_token(url: str, key: str) -> str | None:
    """Generate one token over HTTP. Returns the model's name; None if the server is not ready."""
    try:
        model = str(_call(f"{url}/v1/models", key, None)["data"][0]["id"])
        _call(f"{url}/v1/completions", key, {"model": model, "prompt": "Hello", "max_tokens": 1})
    except (OSError, ValueError):
        return None
    return model


def welcome(url: str, model: str, internal_key: str, *, wants_key: bool) -> str:
    """Return what the terminal shows when the server is ready: its pages, and an example command
    that this model answers."""
    chats = _chats(url, internal_key)
    pages = {"chat": f"{url}/", "API": f"{url}/v1", "docs": f"{url}/docs"}
    if not chats:
        pages.pop("chat")
    lines = [f"  {name:<5} {page}" for name, page in pages.items()]
    return "\n".join([*lines, _example(url, model, chats=chats, wants_key=wants_key)])


def _chats(url: str, key: str) -> bool:
    """Whether the model has a chat template. The server does not start with one that it cannot
    use."""
    try:
        return _call(f"{url}/tokenizer_info", key, None)["chat_template"] is not None
    except (OSError, ValueError):
        return False


def _example(url: str, model: str, *, chats: bool, wants_key: bool) -> str:
    question = "Name the capital of France."
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": question}]} if chats else {"prompt": question}
    body = json.dumps({"model": model, **asked, "max_tokens": 32, "temperature": 0})
    path = "chat/completions" if chats else "completions"
    key = "-H 'Authorization: Bearer YOUR-KEY' " if wants_key else ""
    options = "-k " if url.startswith("https:") else ""
    options += "--noproxy '*' " if proxies_are_named() else ""
    return f"  curl {options}{url}/v1/{path} {key}-H 'Content-Type: application/json' -d '{body}'"


def _call(url: str, key: str, body: dict[str, Any] | None) -> dict[str, Any]:
    json_body = None if body is None else json.dumps(body).encode()
    return dict(json.loads(fetch(url, timeout_s=_TIMEOUT_S, json_body=json_body, api_key=key, verify=False)))


def served_model(target: ConfigFile, internal_key: str) -> str | None:
    """Return the model's name once the server has served a token over HTTP, else None.

    All applications must run first. Raises `DeploymentError`.
    """
    if not is_running(target.applications) or (haproxy_enabled() and not _is_reached_by_haproxy(target)):
        return None
    return first_token(target.url, internal_key)


def _is_reached_by_haproxy(target: ConfigFile) -> bool:
    """Whether HAProxy knows the ingresses. Ray reports applications as running earlier."""
    try:
        return all(haproxy.reaches_ingress(haproxy_metrics_port(), name) for name in target.ours)
    except (OSError, ValueError):
        return False
