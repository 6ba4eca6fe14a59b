"""Steps are measured as often as a start can bear, and the least of all their times counts."""

from collections.abc import Callable, Iterator

import pytest
import torch

from serve_app.core.step_cost import DeviceLimits
from serve_app.errors import ConfigError
from serve_app.model import loader
from serve_app.model.profiling import step_times
from serve_app.model.profiling.step_times import StepTimes
from serve_app.model.runner import ModelRunner
from tests.models import tiny_model


@pytest.fixture
def runner() -> ModelRunner:
    return ModelRunner(loader.from_module(tiny_model("llama", torch.float64), max_model_len=64), 2, None)


def say(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> Iterator[float]:
    """Steps that take so many seconds, one after another, whatever they are; what is left of
    them."""
    left = iter(seconds)
    monkeypatch.setattr(step_times, "_time", lambda _: next(left))
    return left


def test_steps_are_really_run(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.warm_up()
    times = StepTimes(runner, None)
    ran: list[tuple[int, int]] = []
    profile_step = runner.profile_step
    monkeypatch.setattr(runner, "profile_step", lambda *shape: (ran.append(shape), profile_step(*shape)))
    assert 0 < times.largest(500, 2) < 60
    assert set(ran) == {(128, 2)}, "no more than two sequences of 64"
    assert 0 < times.decodes(2) < 60


def test_a_disturbed_time_does_not_count(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    left = say(monkeypatch, 0.08, 0.05, 0.04, 0.06)
    times = StepTimes(runner, None)
    assert times.decodes(1) == 0.05
    assert times.decodes(1) == 0.04
    assert not [*left]


def test_the_longer_a_step_the_fewer_times_it_is_run(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    left = say(monkeypatch, 0.3, 0.2, 0.1, 0.1, 30.0, 7.0)
    times = StepTimes(runner, None)
    assert [times.largest(100, 2) for _ in range(3)] == [0.3, 0.2, 0.1]
    assert [times.largest(500, 2) for _ in range(3)] == [30.0, 30.0, 30.0]
    assert [*left] == [7.0]


def test_decodes_also_read_their_keys(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, 0.25)
    limits = DeviceLimits(bytes_per_s=256.0 * runner.model.cost.kv_bytes, flops_per_s=1.0)
    assert StepTimes(runner, limits).decodes(2, 3) == 2.25


def test_a_step_that_does_not_fit_is_refused_by_its_setting(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(_: Callable[[], None]) -> float:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(step_times, "_time", out_of_memory)
    with pytest.raises(ConfigError, match="max_num_batched_tokens: a step of 100 tokens does not fit"):
        StepTimes(runner, None).largest(100, 2)
