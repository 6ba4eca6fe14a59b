"""A real server with a keys file and a ledger, one for each module that has `keyed` in it."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.launch.ports import free_port
from serve_app.tenants.key_file import add_key
from serve_app.tenants.ledger import read_ledger
from tests.serving.conftest import Server, launch, running, write_config

PROMPT = "Once upon a time " * 40


@dataclass
class Keyed:
    server: Server
    file: Path
    keys: dict[str, str]
    ledger: Path

    def get(self, path: str, name: str | None = None) -> httpx.Response:
        return httpx.get(f"{self.server.url}{path}", headers=self.headers(name), timeout=60)

    def complete(self, name: str | None, **fields: Any) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **fields}
        return httpx.post(f"{self.server.url}/v1/completions", json=body, headers=self.headers(name), timeout=60)

    def headers(self, name: str | None) -> dict[str, str]:
        return {} if name is None else {"authorization": f"Bearer {self.keys.get(name, name)}"}

    def add(self, name: str, **fields: Any) -> None:
        self.keys[name] = add_key(self.file, name, fields)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The ledger's of this key."""
        return [entry for _, entry in read_ledger(self.ledger, date.min, date.max) if entry["key"] == name]


@pytest.fixture(scope="module")
def keyed(
    request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Keyed]:
    """With the environment that the module has in `ENVIRONMENT`."""
    folder = tmp_path_factory.mktemp("keyed")
    args = {
        "model": str(tiny_folder),
        "served_model_name": "tiny",
        "device": "cpu",
        "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_gib": 0.05, "num_threads": 1},
        "ingress": {
            "keys_file": str(folder / "keys.yaml"),
            "ledger_folder": str(folder / "ledger"),
            "failover_wait_s": 120.0,
        },
    }
    keys: dict[str, str] = {}
    built = Keyed(None, folder / "keys.yaml", keys, folder / "ledger")  # type: ignore[arg-type]
    for name, fields in (("a", {}), ("b", {}), ("c", {"prefix_group": "g"}), ("d", {"prefix_group": "g"})):
        built.add(name, **fields)
    built.add("admin", admin=True)
    port = free_port()
    environment = getattr(request.module, "ENVIRONMENT", {})
    with running(launch(write_config(folder, args, port), environment), port) as built.server:
        yield built
