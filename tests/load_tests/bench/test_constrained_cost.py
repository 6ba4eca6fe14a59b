"""What constraints cost, measured on a tiny model and on a server that is none of ours."""

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from load_tests.bench import constrained_cost
from load_tests.bench.constrained_cost import AN_ORDER, ORDER, app, thirty_fields
from load_tests.bench.contestants import CONTESTANTS, Contestant
from load_tests.bench.peer_setup import PeerFolder
from load_tests.servers import ServerCommand
from serve_app import grammars
from serve_app.launch.ports import free_port
from tests.load_tests.bench.test_offline import config

__all__ = ["config"]

WORD_SERVER = Path(__file__).with_name("word_server.py")


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constrained_cost, "ROWS", 3)
    monkeypatch.setattr(constrained_cost, "CONTEXT", 8)
    monkeypatch.setattr(constrained_cost, "DECODED", 8)


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "figures.json"
    result = CliRunner().invoke(app, [*arguments, "--rounds", "1", "--json", str(file)])
    assert result.exit_code == 0, result.output
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


def test_grammars_are_measured(tmp_path: Path) -> None:
    figures = run(tmp_path, "grammars")["grammars"]["first time, ms"]
    assert len(figures) == 5
    assert all(row["median"] > 0 for row in figures.values())


def test_the_engine_is_measured_in_turns(config: Path, tmp_path: Path) -> None:
    found = run(tmp_path, "engine", "--config", str(config))["engine"]
    assert list(found["decode, tokens/s"]) == [f"{count} of 3 rows constrained" for count in (0, 1, 3)]
    assert list(found["one user's order, tokens/s"]) == ["free", "constrained"]
    for figures in found.values():
        ratios = [row["ratio"] for row in figures.values()]
        assert ratios[0] == 1.0
        assert min(ratios) > 0


def test_servers_are_measured_and_one_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def words(_folder: PeerFolder, _config: Path) -> ServerCommand:
        port = free_port()
        return ServerCommand("words", (sys.executable, str(WORD_SERVER), str(port)), f"http://127.0.0.1:{port}", "/")

    def broken(_folder: PeerFolder, _config: Path) -> ServerCommand:
        return ServerCommand("broken", (sys.executable, "-c", "exit(3)"), f"http://127.0.0.1:{free_port()}", "/")

    monkeypatch.setitem(CONTESTANTS, "words", Contestant("words", words))
    monkeypatch.setitem(CONTESTANTS, "broken", Contestant("broken", broken))
    found = run(tmp_path, "servers", "--contestants", "words,broken", "--peers", str(tmp_path))
    assert list(found["words"]) == ["first token, ms", "1 users, tokens/s", "3 users, tokens/s"]
    assert list(found["words"]["first token, ms"]) == ["no schema", "known schema", "new schema"]
    assert "status 3" in found["broken"]["failed"]


def test_the_order_is_one_and_the_schemas_are_new_each_time() -> None:
    jsonschema.validate(AN_ORDER, ORDER)
    grammars.json_schema(ORDER)
    assert thirty_fields(1) != thirty_fields(2)
    fields = [name for group in thirty_fields(1)["properties"].values() for name in group["properties"]]
    assert len(fields) + len(thirty_fields(1)["properties"]) == 30
