"""Sampling by kernels against the sampler of the CPU, which the definitions were held against."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.step_plan import SlotStart
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.errors import InvalidRequestError
from serve_app.grammars.token_set import TokenSet
from serve_app.model.executors.transformers import TransformersExecutor
from serve_app.model.input_batch import sampling_rows
from serve_app.model.loader import from_module
from serve_app.model.sampling import sampler
from serve_app.model.sampling.grammar_masks import mask_out
from serve_app.model.sampling.rows import SamplingRows
from serve_app.model.sampling.sampler import Sampled
from serve_app.model.token_samplers import pick_sampler
from tests.models import tiny_model

# numpy's, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")

EOS = (7,)
DRAWN = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 600},
    {"top_k": 100_000},
    {"top_p": 0.1},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.7},
    {"top_p": 0.9, "min_p": 0.2},
    {"top_k": 500, "top_p": 0.6, "min_p": 0.1, "temperature": 1.9},
]
EDITED = [
    {"repetition_penalty": 1.5},
    {"presence_penalty": 2.0, "frequency_penalty": -1.0},
    {"logit_bias": ((1000, 9.0), (1000, 9.0), (4, -100.0))},
    {"min_tokens": 10, "stop_token_ids": (12, 13)},
    {"allowed_token_ids": (7, 40, 999, 1000), "bad_words": ((40,), (20, 21, 1000))},
    {"bad_words": ((8, 8, 1000), *((token,) for token in range(200)))},
]


HISTORIES = [((3, 5, 5, 11, 20, 20, 21), 4), ((6,), 1), ((8, 9, 8, 8), 1), ((1, 2), 2)]


def make_start(seed: int, fields: dict[str, object]) -> SlotStart:
    """Of a request with one of the `HISTORIES`."""
    token_ids, num_prompt_tokens = HISTORIES[seed % 4]
    return SlotStart(-1, "r", seed % 3, token_ids, num_prompt_tokens, SamplingParams(seed=seed, **fields), ())  # type: ignore[arg-type]


def make_logits(rows: int, vocab: int = 1531) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * 3


def seated(starts: list[SlotStart]) -> SamplingRows:
    return sampling_rows([replace(start, slot=slot) for slot, start in enumerate(starts)])


def on_the_host(logits: torch.Tensor, starts: list[SlotStart]) -> Sampled:
    rows = seated(starts)
    return sampler.sample(logits.clone(), rows.slots, rows.parameters, EOS)


def history_of(starts: list[SlotStart]) -> torch.Tensor:
    """Their tokens by slot, and behind them what the slots' earlier owners left."""
    history = torch.full((len(starts), 9), 20, dtype=torch.int32)
    for line, start in zip(history, starts, strict=True):
        line[: len(start.token_ids)] = torch.tensor(start.token_ids)
    return history


@pytest.fixture
def sample(device: torch.device, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """On the device, with parts so small that rows have many."""
    from serve_app.model.gpu import sampling

    monkeypatch.setattr(sampling, "PART", 256)

    def sample(logits: torch.Tensor, starts: list[SlotStart]) -> Sampled:
        drawn = sampling.sample(logits.clone().to(device), seated(starts), history_of(starts).to(device), EOS)
        assert drawn.token_ids.device.type == device.type
        return drawn.resolve()

    return sample


def test_mixed_rows_agree_with_the_host(sample) -> None:  # type: ignore[no-untyped-def]
    variants = [*DRAWN, *({"temperature": 0.0, **fields} for fields in EDITED), *EDITED]
    starts = [make_start(seed, {"logprobs": seed % 4, **fields}) for seed, fields in enumerate(variants)]
    logits = make_logits(len(starts))
    got, expected = sample(logits, starts), on_the_host(logits, starts)
    assert got.token_ids == expected.token_ids
    assert not got.failed
    for i, entry in expected.logprobs.items():
        assert got.logprobs[i].logprob == pytest.approx(entry.logprob, abs=1e-5)
        assert [token for token, _ in got.logprobs[i].top] == [token for token, _ in entry.top]


@pytest.mark.parametrize("fields", [*EDITED[:2], {**EDITED[0], **EDITED[1]}], ids=str)
def test_penalties_change_the_same_logits_in_the_same_way(fields: dict[str, object], device: torch.device) -> None:
    """In histories of different lengths, with and without output, beside rows that have no
    penalties."""
    from serve_app.model.gpu import sampling
    from serve_app.model.sampling import sampler

    starts = [make_start(seed, fields if seed != 4 else {}) for seed in range(8)]
    rows = seated(starts)
    expected = make_logits(len(starts), 40)
    got = expected.clone().to(device)
    for row, slot in zip(expected, rows.slots, strict=True):
        sampler._edit(row, slot, (), None)
    sampling.penalize(got, rows, history_of(starts).to(device))
    assert torch.equal(got.cpu(), expected)


def test_masks_of_several_rows_leave_out_what_they_say_and_nothing_else(device: torch.device) -> None:
    from serve_app.model.gpu import sampling

    expected = make_logits(6)  # of a vocabulary that neither a byte nor a part divides
    random = np.random.default_rng(0)
    masks = {row: TokenSet.cut(random.integers(0, 256, 200, np.uint8).tobytes(), 1531) for row in (0, 2, 5)}
    masks[5] = masks[5].only(masks[5].ids()[-1])
    got = expected.clone().to(device)
    for row, allowed in masks.items():
        mask_out(expected[row], allowed)
    sampling.mask_out(got, masks)
    assert torch.equal(got.cpu(), expected)


def test_masked_rows_agree_with_the_host(device: torch.device) -> None:
    """Beside penalties and bias, and beside rows without a mask; a mask that leaves nothing fails
    its row alone."""
    from serve_app.model.gpu import sampling

    starts = [make_start(seed, fields) for seed, fields in enumerate([*DRAWN[:4], *EDITED[:3], {}])]
    rows, logits = seated(starts), make_logits(8)
    for row in (1, 2, 4, 5, 6, 7):
        rows.masks[row] = TokenSet.cut(bytes([row, 2 * row, 0]) * 64 if row < 7 else b"", 1531)
    expected = sampler.sample(logits.clone(), rows.slots, rows.parameters, EOS, rows.masks)
    got = sampling.sample(logits.to(device), rows, history_of(starts).to(device), EOS).resolve()
    assert set(got.failed) == set(expected.failed) == {7}
    assert got.token_ids[:7] == expected.token_ids[:7]
    assert isinstance(got.failed[7], InvalidRequestError)


@pytest.mark.parametrize(
    "fields", [{}, {"top_p": 0.8}, {"top_k": 30}, {"top_k": 9, "top_p": 0.5, "min_p": 0.1}], ids=str
)
def test_draws_follow_the_noise(fields: dict[str, object], sample) -> None:  # type: ignore[no-untyped-def]
    starts = [make_start(seed, fields) for seed in range(5)]
    logits = make_logits(1, 700).repeat(5, 1)
    assert sample(logits, starts).token_ids == on_the_host(logits, starts).token_ids


def test_a_row_does_not_depend_on_the_rows_beside_it(sample) -> None:  # type: ignore[no-untyped-def]
    starts = [make_start(seed, fields) for seed, fields in enumerate([*DRAWN[-4:], *EDITED])]
    logits = make_logits(len(starts), 1031)
    together = sample(logits, starts).token_ids
    assert [sample(logits[i : i + 1], [start]).token_ids[0] for i, start in enumerate(starts)] == together


def test_equal_logits(sample) -> None:  # type: ignore[no-untyped-def]
    """The lowest id is the most likely one, and all that are equal to the last one kept stay."""
    starts = [
        make_start(0, {"temperature": 0.0, "logprobs": 3}),
        *(make_start(seed, {"top_k": 2}) for seed in range(8)),
    ]
    logits = torch.full((len(starts), 300), -5.0)
    logits[:, [290, 130, 140]] = 2.0
    got = sample(logits, starts)
    assert got.token_ids[0] == 130
    assert [token for token, _ in got.logprobs[0].top] == [130, 140, 290]
    assert set(got.token_ids[1:]) == {130, 140, 290}
    assert got.token_ids == on_the_host(logits, starts).token_ids


def test_what_is_no_number_fails_alone(sample) -> None:  # type: ignore[no-untyped-def]
    starts = [make_start(seed, {"logprobs": 1}) for seed in range(5)]
    starts.append(make_start(5, {"min_tokens": 9}))
    logits = make_logits(len(starts), 300)
    logits[1, 200] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    logits[5] = -torch.inf
    logits[5, 7] = 1.0
    got, expected = sample(logits, starts), on_the_host(logits, starts)
    assert {i: str(error) for i, error in got.failed.items()} == {i: str(error) for i, error in expected.failed.items()}
    assert sorted(got.failed) == [1, 2, 3, 5]
    assert sorted(got.logprobs) == [0, 4]
    assert [got.token_ids[i] for i in (0, 4)] == [expected.token_ids[i] for i in (0, 4)]


def test_ids_outside_the_vocabulary_are_refused(sample) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(IndexError):
        sample(make_logits(2, 300), [make_start(0, {"logit_bias": ((300, 1.0),)}), make_start(1, {})])


@pytest.mark.parametrize("broken", ["choose", "penalize"])
def test_the_check_at_start(broken: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from serve_app.model.gpu import sampling

    assert sampling.agrees(2000, device)
    monkeypatch.setattr(sampling, broken, lambda logits, *rest: torch.zeros_like(logits[:, 0], dtype=torch.int64))
    assert not sampling.agrees(2000, device)


def test_every_kernel_that_requests_need_has_run_when_the_engine_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """On transformers' modules, whose steps no graph holds: a kernel is compiled for each dtype of
    logits."""
    from serve_app.model.gpu import sampling

    launched: set[torch.dtype] = set()
    choose = sampling.choose

    def record(logits: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        launched.add(logits.dtype)
        return choose(logits, params)

    monkeypatch.setattr(sampling, "choose", record)
    model = from_module(tiny_model("llama", torch.bfloat16), max_model_len=64, attention_backend="reference")
    assert isinstance(model.executor, TransformersExecutor)
    monkeypatch.setattr(model.executor, "choose", model.executor._choose)  # as on a GPU
    monkeypatch.setattr(model, "_sampler", pick_sampler(model.executor, model.facts))
    assert model.sampler == "DeviceSampler"
    core = EngineCore(model, EngineConfig(max_num_batched_tokens=16, max_num_seqs=2, kv_cache_gib=0.01))
    before = set(launched)
    for name, penalty in (("plain", 0.0), ("penalized", 0.5)):
        core.add(EngineRequest(name, (5, 6), SamplingParams(seed=1, max_tokens=3, frequency_penalty=penalty)))
    while core.has_unfinished:
        core.step()
    assert before == launched == {torch.bfloat16, torch.float32}
