"""A request whose replicas are lost at any token gives what it gives undisturbed: real engines, scripted losses."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.output import FinishReason
from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.engine.async_engine import AsyncEngine
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.errors import (
    ENGINE_DIED,
    ContextLengthError,
    EngineError,
    OverloadedError,
    RequestTimeoutError,
    UnavailableError,
)
from serve_app.model import loader
from serve_app.serving.attempt import LossReason
from tests.models import tiny_model
from tests.serving.replicas import Fault, Fleet, Told, told

PLANNED = [LossReason.LEFT, LossReason.CUT]


@dataclass
class Lab:
    """Two engines with the same weights, and the loop they live on."""

    runner: asyncio.Runner
    engines: dict[str, AsyncEngine]

    def fleet(self) -> Fleet:
        return Fleet(self.engines)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    async def start() -> AsyncEngine:
        model = loader.from_module(tiny_model("llama", torch.float64), max_model_len=128)
        config = EngineConfig(max_num_batched_tokens=16, kv_cache_gib=0.05)
        return await AsyncEngine.start_with(lambda: EngineCore(model, config))

    async def start_both() -> dict[str, AsyncEngine]:
        return {"a": await start(), "b": await start()}

    with asyncio.Runner() as runner:
        engines = runner.run(start_both())
        yield Lab(runner, engines)
        for engine in engines.values():
            runner.run(engine.shutdown())


def request(prompt_length: int = 20, **params: object) -> EngineRequest:
    generator = torch.Generator().manual_seed(prompt_length)
    prompt = torch.randint(2, 199, (prompt_length,), generator=generator).tolist()
    return EngineRequest("r", tuple(prompt), SamplingParams(**{"seed": 5, "max_tokens": 10, **params}))  # type: ignore[arg-type]


def without_cache(choices: list[Told]) -> list[Told]:
    """What the prefix cache holds depends on who ran before."""
    return [replace(choice, cached=[]) for choice in choices]


VARIANTS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.1, "top_p": 0.95},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "two choices": {"n": 2, "temperature": 1.3, "logprobs": 1},
    "min tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(2, 199, 3)), "temperature": 1.5},
    "stop tokens": {"stop_token_ids": tuple(range(2, 199, 5)), "temperature": 1.5},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_lost_at_every_item_and_told_once(lab: Lab, variant: str) -> None:
    subject = request(**VARIANTS[variant])

    async def run() -> None:
        expected = without_cache(await told(lab.fleet().failover, subject))
        items = 1 + max(len(choice.token_ids) for choice in expected) + subject.params.n
        for at in range(items):
            fleet = lab.fleet()
            fleet.faults = [Fault(at, LossReason.DIED)]
            assert without_cache(await told(fleet.failover, subject)) == expected
            if fleet.losses:
                assert [name for _, name in fleet.placed] in (["a", "b"], ["b", "a"])

    lab.runner.run(run())


@st.composite
def subjects(draw: st.DrawFn) -> EngineRequest:
    greedy = draw(st.booleans())
    max_tokens = draw(st.integers(1, 14))
    return request(
        draw(st.sampled_from([1, 7, 16, 33, 40])),
        n=draw(st.integers(1, 3)),
        temperature=0.0 if greedy else 1.2,
        seed=draw(st.integers(0, 3)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=draw(st.sampled_from([(), tuple(range(2, 199, 4))])),
        frequency_penalty=draw(st.sampled_from([0.0, 1.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.5])),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, 1])),
    )


@settings(max_examples=60, deadline=None)
@given(subject=subjects(), faults=st.lists(st.tuples(st.integers(0, 8), st.sampled_from(PLANNED)), max_size=4))
def test_any_request_lost_any_number_of_times(
    lab: Lab, subject: EngineRequest, faults: list[tuple[int, LossReason]]
) -> None:
    async def run() -> None:
        expected = without_cache(await told(lab.fleet().failover, subject))
        fleet = lab.fleet()
        fleet.faults = [Fault(*fault) for fault in faults]
        assert without_cache(await told(fleet.failover, subject)) == expected
        assert len(fleet.observer.ends) == len(fleet.placed) == len(fleet.losses) + 1

    lab.runner.run(run())
