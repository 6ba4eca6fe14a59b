"""How the launcher sees that the server serves: over HTTP like any client, with an API key of its own.

A certificate is for the server's name elsewhere, so that the launcher, which calls it by its address, looks at none.
"""

import json
from pathlib import Path
from typing import Any

from serve_app.environment import proxies_are_named
from serve_app.system.http_client import fetch
from serve_app.tenants.keys import new_key

_TIMEOUT_S = 60.0


def write_internal_key(path: Path) -> str:
    """Make a key for this run of the server, and write it where only this user, and so the ingress, can read it."""
    key = new_key()
    path.touch(0o600)
    path.write_text(key)
    return key


def first_token(url: str, key: str) -> str | None:
    """Have one token generated over HTTP; the model's name, or None if the server is not that far."""
    try:
        model = str(_call(f"{url}/v1/models", key, None)["data"][0]["id"])
        _call(f"{url}/v1/completions", key, {"model": model, "prompt": "Hello", "max_tokens": 1})
    except (OSError, ValueError):
        return None
    return model


def example(url: str, model: str, *, wants_key: bool) -> str:
    """A command that asks the server something."""
    question = [{"role": "user", "content": "Name the capital of France."}]
    body = json.dumps({"model": model, "messages": question, "max_tokens": 32, "temperature": 0})
    key = "-H 'Authorization: Bearer YOUR-KEY' " if wants_key else ""
    options = "-k " if url.startswith("https:") else ""
    options += "--noproxy '*' " if proxies_are_named() else ""
    return f"  curl {options}{url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{body}'"


def _call(url: str, key: str, body: dict[str, Any] | None) -> dict[str, Any]:
    json_body = None if body is None else json.dumps(body).encode()
    return dict(json.loads(fetch(url, timeout_s=_TIMEOUT_S, json_body=json_body, api_key=key, verify=False)))
