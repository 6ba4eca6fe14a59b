"""Families on the C kernels, in float32: the engine's greedy tokens are transformers', with prompts
longer than the windows."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.model.paged_model import PagedModel
from tests.engine.harness import Harness, Run
from tests.engine.test_parity import generate_alone
from tests.models import VOCAB_SIZE, in_mode, needs_compiler, tiny_model

pytestmark = [needs_compiler, pytest.mark.wide, pytest.mark.usefixtures("cheap_drafts")]

MAX_TOKENS = 20
CONTEXT = 640


@dataclass
class Subject:
    model: PagedModel
    prompts: list[list[int]]
    expected: list[list[int]]

    def run(self, n: int = 1, **config: Any) -> Run:
        return self.run_twice(n, times=1, **config)

    def run_twice(self, n: int = 1, times: int = 2, **config: Any) -> Run:
        """On one engine. The tokens of each run are compared."""
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, n=n)
        harness = Harness(self.model, **config)
        for _ in range(times):
            requests = [EngineRequest(f"r{i}", tuple(prompt), params) for i, prompt in enumerate(self.prompts)]
            run = harness.run(requests)
            for (request_id, choice), outcome in run.outcomes.items():
                assert outcome.token_ids == self.expected[int(request_id[1:])], (request_id, choice)
        return run


@pytest.fixture(scope="module", params=["gemma3", "gemma4", "smollm3"])
def subject(request: pytest.FixtureRequest) -> Subject:
    """Prompts of 600 tokens, random and repetitive, two of which the smallest pool holds until they
    grow, and short ones that begin alike."""
    module = tiny_model(request.param, torch.float32, max_position_embeddings=CONTEXT)
    generator = torch.Generator().manual_seed(3)
    long, shared, *pair = (
        torch.randint(2, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (600, 40, 303, 303)
    )
    prompts = [long, ([11, 12, 13, 14, 15] * 120), *pair, [*shared, 5], [*shared, 6, 7], [9]]
    wide = tiny_model(request.param, torch.float64, max_position_embeddings=CONTEXT)
    return Subject(in_mode("none", module), prompts, [generate_alone(wide, p, MAX_TOKENS) for p in prompts])


def test_in_chunks_with_drafts(subject: Subject) -> None:
    run = subject.run(max_num_batched_tokens=100)
    assert sum(record.num_draft_tokens for record in run.records) > 0


def test_preempted(subject: Subject) -> None:
    run = subject.run(num_blocks=CONTEXT // 16 + 2, speculation="off")
    assert run.num_preemptions > 0


def test_prefix_hits_and_choices(subject: Subject) -> None:
    run = subject.run_twice(n=3, max_num_batched_tokens=256)
    assert run.num_hit_tokens >= 592 + 592
