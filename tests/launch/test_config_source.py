"""What a command line serves: a model or a config file, changed by options."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.errors import ConfigError
from serve_app.launch.config_file import read_config
from serve_app.launch.config_source import ConfigSource
from serve_app.settings import Settings
from serve_app.tenants.key_file import read_key_file
from tests.serving.conftest import REPOSITORY

# Ray's schemas use a form that pydantic deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")


def args_of(source: ConfigSource, scratch: Path) -> dict[str, Any]:
    return dict(source.read(scratch)["applications"][0]["args"])


def test_without_a_target_it_is_the_repositorys_config(tmp_path: Path) -> None:
    ours, shown = ConfigSource().read(tmp_path), yaml.safe_load((REPOSITORY / "deploy" / "config.yaml").read_text())
    settings = [data["applications"][0].pop("args") for data in (ours, shown)]
    assert ours == shown
    assert Settings.model_validate(settings[0]) == Settings.model_validate(settings[1])


def test_a_model_has_the_defaults_of_the_settings(tiny_folder: Path, tmp_path: Path) -> None:
    config = read_config(ConfigSource.of(str(tiny_folder), None), tmp_path)
    assert config.ours["serve_app"] == Settings(model=str(tiny_folder))
    assert (config.host, config.port) == ("127.0.0.1", 8000)


def test_options_change_a_config_file(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    args = {"model": str(tiny_folder), "engine": {"max_num_seqs": 4, "policy": "priority"}}
    file.write_text(
        yaml.safe_dump({"applications": [{"name": "a", "import_path": "serve_app.app:build", "args": args}]})
    )
    options: dict[str, Any] = {
        "http": {"host": "localhost", "port": 9000},
        "settings": {"engine.max_num_seqs": 8},
    }
    config = read_config(ConfigSource.of(str(file), None, **options), tmp_path)
    assert config.port == 9000
    assert config.ours["a"].engine.max_num_seqs == 8
    assert config.ours["a"].engine.policy == "priority"
    named = ConfigSource.of("default", file)
    assert args_of(named, tmp_path)["model"] == "default"
    # nothing is kept: the file is read again
    assert yaml.safe_load(file.read_text())["applications"][0]["args"] == args


def test_a_key_of_the_command_line_is_the_only_one(tiny_folder: Path, tmp_path: Path) -> None:
    key = "a-key-of-the-command-line"
    file = args_of(ConfigSource(str(tiny_folder), api_key=key), tmp_path)["ingress"]["keys_file"]
    assert Path(file).stat().st_mode & 0o777 == 0o600
    assert key not in Path(file).read_text()
    ring = read_key_file(Path(file))
    assert [tenant.name for tenant in ring.tenants] == ["command-line"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("missing.gguf",), "missing.gguf: model: no GGUF file at"),
        (("missing.yaml",), "missing.yaml: "),
        (("no such model!",), "is neither 'default', an existing folder, a .gguf file nor a hub id"),
        (("a.yaml", "--config", "b.yaml"), "both config files"),
        (("--set", "engine"), "--set engine: must be KEY=VALUE"),
        (("--set", "engine.kv_cach=1"), "unknown setting `engine.kv_cach` (did you mean `kv_cache_gib`?)"),
        (("--set", "engine.kv_cache_gib=["), "its value is not valid YAML"),
        (("--api-key", "short"), "--api-key: must have at least 16 characters, got 5"),
        (("--port", "99999"), "port"),
        (("--replicas", "0"), "`num_replicas`"),
        (("--dtype", "int4"), "`dtype`"),
        (("--served-model-name", ","), "`served_model_name`"),
        (("--host", "0.0.0.0"), "allow_anonymous"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "serve_app.cli", "serve", *arguments]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr


@pytest.mark.parametrize(("text", "said"), [("args:", None), ("args: [1]", "args: must be a mapping, got list")])
def test_args_of_another_type_are_refused(tmp_path: Path, text: str, said: str | None) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"applications:\n- import_path: serve_app.app:build\n  {text}\n")
    source = ConfigSource(model="default", file=file, http={"port": 9000})
    if said is None:
        assert args_of(source, tmp_path) == {"model": "default"}
    else:
        with pytest.raises(ConfigError, match=re.escape(said)):
            source.read(tmp_path)


def test_several_applications_take_no_options(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(yaml.safe_dump({"applications": [{"name": "a"}, {"name": "b"}]}))
    with pytest.raises(ConfigError, match="exactly one application"):
        ConfigSource(model="default", file=file).read(tmp_path)
