"""Settings refuse what is wrong with the key's name, in one line; the deploy files pass, also
Serve's own schema."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.environment import ENGINE_ENVIRONMENT, bypass_proxies, export
from serve_app.errors import ConfigError
from serve_app.settings import Settings, setting_rows
from tests.quiet_ray import ServeDeploySchema

DEPLOY = Path(__file__).parents[1] / "deploy"
LOOPBACK = "localhost,127.0.0.1,::1,127.0.0.0/8"


def refusal(args: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Settings.model_validate(args)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_nothing_given_means_the_defaults() -> None:
    settings = Settings.model_validate({})
    assert (settings.model, settings.device, settings.num_replicas) == ("default", "auto", 1)
    assert settings.engine.max_num_seqs == settings.engine.max_num_batched_tokens == "auto"


def test_unknown_keys_are_named_with_the_likely_one() -> None:
    assert refusal({"modell": "x"}) == "unknown setting `modell` (did you mean `model`?)"
    text = refusal({"engine": {"max_num_seq": 4}})
    assert text == "unknown setting `engine.max_num_seq` (did you mean `max_num_seqs`?)"
    assert "known: keys_file" in refusal({"ingress": {"zzz": 1}})


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"engine": {"max_num_seqs": 0}}, "engine.max_num_seqs"),
        ({"engine": {"max_num_seqs": "8"}}, "engine.max_num_seqs"),
        ({"engine": {"max_num_seqs": True}}, "engine.max_num_seqs"),
        ({"engine": {"max_num_seqs": 4097}}, "engine.max_num_seqs"),
        ({"engine": {"max_num_seqs": None}}, "engine.max_num_seqs"),
        ({"engine": {"max_wait_s": -0.1}}, "engine.max_wait_s"),
        ({"engine": {"max_wait_s": float("nan")}}, "engine.max_wait_s"),
        ({"engine": {"policy": "lifo"}}, "engine.policy"),
        ({"engine": None}, "engine"),
        ({"dtype": "int8"}, "dtype"),
        ({"num_replicas": 0}, "num_replicas"),
        ({"model": ""}, "model"),
        ({"ingress": {"max_queued_requests": -1}}, "ingress.max_queued_requests"),
    ],
)
def test_impossible_values_are_named(args: dict[str, Any], key: str) -> None:
    assert refusal(args).startswith(f"setting `{key}`: ")


def test_every_problem_is_told_in_the_one_line() -> None:
    text = refusal({"dtype": "int8", "typo": 1})
    assert "`dtype`" in text
    assert "`typo`" in text


def test_args_must_be_a_mapping() -> None:
    assert "mapping" in refusal(["model"])


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings.model_validate({}).model = "other"  # type: ignore[misc]


def test_places_follow_from_slots() -> None:
    settings = Settings.model_validate({"num_replicas": 3, "engine": {"max_num_seqs": 4}})
    assert (settings.max_num_waiting, settings.max_ongoing_per_replica, settings.max_ongoing_requests) == (4, 8, 24)
    settings = Settings.model_validate({"engine": {"max_num_seqs": 4, "max_num_waiting": 0}})
    assert settings.max_ongoing_requests == 4


def test_who_gives_neither_a_number_nor_auto_is_told_what_would_be_right() -> None:
    text = refusal({"engine": {"max_num_seqs": "automatic"}})
    assert text == "setting `engine.max_num_seqs`: must be `auto` or an integer from 1 to 4096, got 'automatic'"
    text = refusal({"engine": {"max_num_batched_tokens": 0}})
    assert text == "setting `engine.max_num_batched_tokens`: must be `auto` or an integer from 1 to 1048576, got 0"


def test_places_of_automatic_slots_are_the_most_until_the_engine_has_chosen() -> None:
    settings = Settings.model_validate({"engine": {"max_num_batched_tokens": 100}})
    assert (settings.max_slots, settings.max_ongoing_per_replica) == (50, 100)
    chosen = settings.with_chosen(max_num_seqs=24)
    assert (chosen.max_slots, chosen.max_ongoing_per_replica) == (24, 48)
    assert chosen.engine.max_num_batched_tokens == 100


@pytest.mark.parametrize("name", sorted(path.name for path in DEPLOY.glob("config*.yaml")))
def test_deploy_files_are_valid(name: str) -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load((DEPLOY / name).read_text()))
    for application in config.applications:
        assert application.import_path == "serve_app.app:build"
        Settings.model_validate(application.args)


def test_the_default_config_shows_the_defaults_and_stays_at_home() -> None:
    config = yaml.safe_load((DEPLOY / "config.yaml").read_text())
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8000}
    args = config["applications"][0]["args"]
    assert args["engine"].pop("kv_cache_gib") == 1.0
    assert args["ingress"].pop("tools") == "hermes"
    assert Settings.model_validate(args) == Settings.model_validate({})


def test_every_setting_is_described() -> None:
    rows = list(setting_rows())
    assert ("engine.max_num_seqs", "auto") in [row[:2] for row in rows]
    assert [key for key, _, meaning in rows if not meaning] == []


@pytest.mark.parametrize(
    ("given", "no_proxy", "no_grpc_proxy"),
    [
        ({"http_proxy": "http://p"}, LOOPBACK, LOOPBACK),
        ({"HTTP_PROXY": "http://p", "NO_PROXY": "a, b"}, f"a,b,{LOOPBACK}", f"a,b,{LOOPBACK}"),
        ({"all_proxy": "http://p", "no_proxy": "*"}, "*", LOOPBACK),
        ({"grpc_proxy": "http://p", "no_proxy": "a", "no_grpc_proxy": "g"}, f"a,{LOOPBACK}", f"g,{LOOPBACK}"),
        ({"https_proxy": "http://p", "no_proxy": "localhost"}, LOOPBACK, LOOPBACK),
        ({"no_proxy": "a"}, "a", None),
    ],
)
def test_loopback_is_excepted_from_proxies_and_what_the_user_excepts_stays_so(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], no_proxy: str, no_grpc_proxy: str | None
) -> None:
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    monkeypatch.setattr(os, "environ", {**environment, **given})
    bypass_proxies()
    found = dict(os.environ)
    assert found["no_proxy"] == no_proxy
    assert found.get("no_grpc_proxy") == no_grpc_proxy
    assert found.get("NO_PROXY") == (None if no_grpc_proxy is None else no_proxy)


@pytest.mark.parametrize(("given", "found"), [(None, "PCI_BUS_ID"), ("FASTEST_FIRST", "FASTEST_FIRST")])
def test_a_replica_numbers_gpus_as_ray_and_nvml_do_unless_told_otherwise(
    given: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {} if given is None else {"CUDA_DEVICE_ORDER": given}
    monkeypatch.setattr(os, "environ", environment)
    export(ENGINE_ENVIRONMENT)
    assert environment["CUDA_DEVICE_ORDER"] == found
