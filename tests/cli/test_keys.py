"""`serve-app keys`: a key is shown once, its file holds a hash."""

from datetime import UTC, datetime
from pathlib import Path

import yaml
from typer.testing import CliRunner

from serve_app.cli import app
from serve_app.tenants.key_file import read_key_file

NOW = datetime(2026, 11, 23, tzinfo=UTC)


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["keys", *words])
    assert result.exit_code == 0, result.output
    return result.output.strip()


def test_a_key_is_made_listed_and_revoked(tmp_path: Path) -> None:
    file = ["--file", str(tmp_path / "keys.yaml")]
    options = ["--expires", "2027-01-31", "--weight", "3", "--model", "x", "--model", "y", "--prefix-group", "g"]
    key = run("new", "team-a", *options, *file)
    boss = run("new", "boss", "--admin", *file)
    text = (tmp_path / "keys.yaml").read_text()
    assert key not in text
    entry = yaml.safe_load(text)["team-a"]
    assert {name: value for name, value in entry.items() if name not in ("sha256", "expires")} == {
        "weight": 3,
        "models": ["x", "y"],
        "prefix_group": "g",
    }
    ring = read_key_file(tmp_path / "keys.yaml")
    assert ring.find(key, NOW).expires == datetime(2027, 1, 31, tzinfo=UTC)
    assert (ring.find(key, NOW).admin, ring.find(boss, NOW).admin) == (False, True)
    listed = run("list", *file)
    assert listed.splitlines() == [
        "team-a  expires=2027-01-31T00:00:00Z  models=x,y  weight=3  prefix_group=g",
        "boss  admin=True",
    ]
    run("revoke", "team-a", *file)
    assert [tenant.name for tenant in read_key_file(tmp_path / "keys.yaml").tenants] == ["boss"]


def test_what_is_refused_is_one_line(tmp_path: Path) -> None:
    for words in (["new", "a b"], ["revoke", "a"], ["list"], ["new", "a", "--weight", "0"]):
        result = CliRunner().invoke(app, ["keys", *words, "--file", str(tmp_path / "keys.yaml")])
        assert result.exit_code == 1
        assert result.output.startswith("serve-app: ")
        assert result.output.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
