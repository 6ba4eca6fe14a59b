"""Greedy output of mixtures of experts on the CPU kernels equals transformers', token for token, in
float32."""

from typing import Any

import pytest
import torch

from serve_app.core.request import EngineRequest
from tests.engine.harness import Harness
from tests.engine.test_parity import MAX_TOKENS, Subject, generate_alone
from tests.mixtures import KERNEL_MIXTURES, mixture
from tests.models import VOCAB_SIZE, in_mode, needs_compiler

pytestmark = [needs_compiler, pytest.mark.wide]


def make_prompts() -> list[list[int]]:
    """Two of them cross many windows; two begin alike; one repeats itself, so that drafts are
    accepted."""
    generator = torch.Generator().manual_seed(2)
    long, short, more = (torch.randint(2, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (600, 17, 40))
    return [long, short, [*more, 2], [*more, 3], [*short[:7] * 12], [5]]


@pytest.fixture(scope="module", params=KERNEL_MIXTURES)
def subject(request: pytest.FixtureRequest) -> Subject:
    module: Any = mixture(request.param)
    prompts = make_prompts()
    model = in_mode("none", module)
    assert model.attention_backend == "kernels"
    return Subject(model, prompts, [generate_alone(module, prompt, MAX_TOKENS) for prompt in prompts])


def test_chunked_and_forked(subject: Subject) -> None:
    run = Harness(subject.model, max_num_seqs=7, max_num_batched_tokens=64).run(subject.requests(n=2))
    subject.check(run)


def test_preempted(subject: Subject) -> None:
    run = Harness(subject.model, num_blocks=1024 // 16 + 2, max_num_batched_tokens=128).run(
        [request for copy in range(3) for request in _renamed(subject.requests(), copy)]
    )
    for (request_id, _), outcome in run.outcomes.items():
        assert outcome.token_ids == subject.expected[int(request_id.partition("-")[0][1:])]
    assert run.num_preemptions > 0


def _renamed(requests: list[EngineRequest], copy: int) -> list[EngineRequest]:
    return [EngineRequest(f"{each.request_id}-{copy}", each.prompt_token_ids, each.params) for each in requests]


@pytest.mark.usefixtures("cheap_drafts")
def test_prefix_hits_and_drafts(subject: Subject) -> None:
    harness = Harness(subject.model)
    harness.run(subject.requests())
    run = harness.run(subject.requests())
    subject.check(run)
    assert run.num_hit_tokens >= 592 + 32
    assert sum(record.num_accepted_tokens for record in run.records) > 0
