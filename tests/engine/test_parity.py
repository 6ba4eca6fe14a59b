"""Greedy output of the engine equals transformers' `generate` run alone, token for token.

Random models run in float64, so that rounding cannot decide between two tokens.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.model.loader import from_module
from serve_app.model.paged_model import PagedModel
from serve_app.text.tokenizer import load_tokenizer
from tests.engine.harness import Harness, Run
from tests.models import ARCHITECTURES, VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.wide

MAX_TOKENS = 20
CONTEXT = 96
SHARED = [int(i) for i in torch.randint(2, VOCAB_SIZE, (33,), generator=torch.Generator().manual_seed(5))]


def generate_alone(module: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """transformers' own greedy output, the end token included."""
    ids = torch.tensor([prompt])
    output = module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


def make_prompts() -> list[list[int]]:
    """Lengths around block borders, and four that begin alike."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (1, 15, 16, 17, 50)]
    return [*prompts, *([*SHARED, i] for i in range(2, 6))]


@dataclass
class Subject:
    model: PagedModel
    prompts: list[list[int]]
    expected: list[list[int]]

    def requests(self, n: int = 1) -> list[EngineRequest]:
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, n=n)
        return [EngineRequest(f"r{i}", tuple(prompt), params) for i, prompt in enumerate(self.prompts)]

    def check(self, run: Run) -> None:
        for (request_id, choice), outcome in run.outcomes.items():
            assert outcome.token_ids == self.expected[int(request_id[1:])], (request_id, choice)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def subject(request: pytest.FixtureRequest) -> Subject:
    module = tiny_model(request.param)
    prompts = make_prompts()
    return Subject(
        from_module(module, max_model_len=CONTEXT), prompts, [generate_alone(module, p, MAX_TOKENS) for p in prompts]
    )


def test_packed(subject: Subject) -> None:
    subject.check(Harness(subject.model).run(subject.requests()))


def test_chunked(subject: Subject) -> None:
    """Chunks of eight tokens and less, cut at odd places because decodes take their share first."""
    harness = Harness(subject.model, max_num_seqs=5, max_num_batched_tokens=8)
    run = harness.run(subject.requests())
    subject.check(run)
    assert any(row.is_prefill and row.start > 0 for record in run.records for row in record.rows)


def test_preempted(subject: Subject) -> None:
    # Without drafts, with which some end before they need the last blocks; see test_speculation for
    # both at once.
    run = Harness(subject.model, num_blocks=CONTEXT // 16 + 2, speculation="off").run(subject.requests())
    subject.check(run)
    assert run.num_preemptions > 0


def test_prefix_hit(subject: Subject) -> None:
    harness = Harness(subject.model)
    harness.run(subject.requests())
    run = harness.run(subject.requests())
    subject.check(run)
    assert run.outcomes["r4", 0].num_cached_tokens == 48
    assert run.num_hit_tokens >= 48 + 4 * 32


def test_without_prefix_cache(subject: Subject) -> None:
    run = Harness(subject.model, enable_prefix_cache=False).run(subject.requests())
    subject.check(run)
    assert run.num_hit_tokens == 0


def test_forked(subject: Subject) -> None:
    subject.check(Harness(subject.model, max_num_seqs=7, max_num_batched_tokens=16).run(subject.requests(n=3)))


def test_separate_prefill(subject: Subject) -> None:
    run = Harness(subject.model, prefill="separate", max_num_seqs=4, max_num_batched_tokens=24).run(subject.requests())
    subject.check(run)
    assert not any(record.num_prefill_tokens and record.num_decode_tokens for record in run.records)


def test_static_policy(subject: Subject) -> None:
    run = Harness(subject.model, policy="static", max_wait_s=0.0, max_num_seqs=4).run(subject.requests())
    subject.check(run)
    assert len({len(record.rows) for record in run.records}) > 1


PLACES = ("France", "Japan", "Peru", "Kenya", "Norway", "India", "Egypt", "Chile", "Spain", "Ghana")
TEXTS = [
    *(f"The capital of {place} is" for place in PLACES),
    *(f"Write one sentence about the history of {place}." for place in PLACES),
]


def test_default_model(default_model: PagedModel, default_module: Any) -> None:
    """20 prompts on the real model in float32. The closest its two best tokens come in them is
    0.02, which no rounding bridges."""
    tokenizer = load_tokenizer("default")
    prompts = [tokenizer.encode(text) for text in TEXTS[:10]]
    prompts += [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in TEXTS[10:]]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    requests = [EngineRequest(str(i), tuple(prompt), params) for i, prompt in enumerate(prompts)]
    run = Harness(default_model, max_num_batched_tokens=128).run(requests)
    for i, prompt in enumerate(prompts):
        assert run.outcomes[str(i), 0].token_ids == generate_alone(default_module, prompt, 24), f"prompt {i}"
