"""What a `user_config` may say, and how it is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.core.config import LIVE_KNOBS, SchedulerKnobs
from serve_app.errors import ConfigError
from serve_app.serving.knobs import live_knobs, scheduler_knobs
from serve_app.settings import Settings

REPOSITORY = Path(__file__).parents[2]
BUILT = Settings.model_validate({"engine": {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_wait_s": 2.0}})


def test_what_it_leaves_out_is_as_built() -> None:
    assert live_knobs(BUILT, {}) == scheduler_knobs(BUILT) == SchedulerKnobs(max_num_seqs=8, max_wait_s=2.0)
    changed = live_knobs(BUILT, {"waiting_served_ratio": 1.5, "max_num_seqs": 4})
    assert changed == SchedulerKnobs(max_num_seqs=4, max_wait_s=2.0, waiting_served_ratio=1.5)


def test_what_is_automatic_is_the_most_before_start_and_what_was_chosen_after() -> None:
    settings = Settings()
    assert live_knobs(settings, {}) == scheduler_knobs(settings)
    assert scheduler_knobs(settings) == SchedulerKnobs(max_num_seqs=256, max_num_batched_tokens=8192)
    chosen = settings.with_chosen(max_num_seqs=48, max_num_batched_tokens=256)
    left = {"max_num_seqs": "auto", "max_num_batched_tokens": "auto"}
    assert live_knobs(chosen, left) == SchedulerKnobs(max_num_seqs=48, max_num_batched_tokens=256)
    assert live_knobs(chosen, {"max_wait_s": 2.0}).max_num_seqs == 48
    assert live_knobs(chosen, {"max_num_seqs": 8}).max_num_seqs == 8
    with pytest.raises(ConfigError, match="max_num_seqs must be at most 48"):
        live_knobs(chosen, {"max_num_seqs": 64})


def test_other_knobs_have_an_auto_of_their_own() -> None:
    built = Settings.model_validate({"engine": {"speculation": "off"}})
    assert live_knobs(built, {"speculation": "auto"}).speculation == "auto"
    with pytest.raises(ConfigError, match=r"setting `engine.max_wait_s`"):
        live_knobs(built, {"max_wait_s": "auto"})


def test_every_live_knob_can_be_given() -> None:
    given = {key: value for key, value in scheduler_knobs(BUILT).knobs().items() if key in LIVE_KNOBS}
    assert set(given) == set(LIVE_KNOBS)
    assert live_knobs(BUILT, given) == scheduler_knobs(BUILT)


@pytest.mark.parametrize(
    ("user_config", "words"),
    [
        ({"max_wait": 1.0}, "`max_wait` cannot change in a running engine (did you mean `max_wait_s`?)"),
        ({"policy": "priority"}, "`policy` cannot change in a running engine"),
        ({"num_threads": 2}, "`num_threads` cannot change"),
        ({3: 2}, "`3` cannot change"),
        ({"max_wait_s": -1.0}, "setting `engine.max_wait_s`"),
        ({"max_wait_s": "1"}, "setting `engine.max_wait_s`"),
        ({"prefill": "none"}, "setting `engine.prefill`"),
        ({"max_num_seqs": 9}, "max_num_seqs must be at most 8"),
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens (4) must be at least max_num_seqs (8)"),
        ({"max_num_batched_tokens": 4096}, "max_num_batched_tokens must be at most 256"),
        ("max_wait_s", "must be a mapping"),
        (["max_wait_s"], "must be a mapping"),
    ],
)
def test_what_is_wrong_is_named(user_config: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        live_knobs(BUILT, user_config)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", sorted((REPOSITORY / "deploy").glob("config*.yaml")), ids=lambda path: str(path.name))
def test_the_deploy_files_change_nothing_that_cannot(path: Path) -> None:
    for application in yaml.safe_load(path.read_text())["applications"]:
        for deployment in application.get("deployments", ()):
            live_knobs(Settings.model_validate(application["args"]), deployment["user_config"])
