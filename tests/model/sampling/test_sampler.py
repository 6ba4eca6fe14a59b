"""The sampler against a slow twin that follows the definitions in float64, one row at a time."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from serve_app.core.sampling_params import SamplingParams
from serve_app.errors import EngineError, InvalidRequestError
from serve_app.model.sampling import noise as noise_module
from serve_app.model.sampling import sampler
from serve_app.model.sampling.columns import request_columns
from serve_app.model.sampling.rows import Slot
from serve_app.model.sampling.sampler import Sampled, rank

VOCAB = 1531  # a prime above the number of parts, so that the last part is filled up
EOS = 7


def uniform(seeds: list[int], choices: list[int], positions: Sequence[int]) -> np.ndarray:
    return noise_module.at(noise_module.keys(seeds, choices), np.array(positions, dtype=np.int64))


def make_slot(params: SamplingParams, tokens: list[int] | None = None, num_prompt: int = 4, choice: int = 0) -> Slot:
    known = [3, 5, 5, 11, 20, 20, 21] if tokens is None else tokens
    line = np.zeros(64, dtype=np.int64)
    line[: len(known)] = known
    return Slot("r", choice, params, num_prompt, len(known), line, 0)


def make_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sample(logits: torch.Tensor, slots: list[Slot], eos: tuple[int, ...]) -> Sampled:
    """By their parameters as an `InputBatch` lays them out."""
    params = [slot.params for slot in slots]
    noise = uniform([p.seed or 0 for p in params], [s.choice for s in slots], [s.num_tokens for s in slots])
    parameters = np.array([[*request_columns(p), u] for p, u in zip(params, noise, strict=True)])
    return sampler.sample(logits, slots, parameters, eos)


def run_one(logits: torch.Tensor, slot: Slot) -> int:
    result = sample(logits[None].clone(), [slot], (EOS,))
    assert not result.failed
    return result.token_ids[0]


def bar(row: np.ndarray, params: SamplingParams, said: list[int]) -> None:
    """What may not come."""
    if params.allowed_token_ids:
        row[[token for token in range(len(row)) if token not in params.allowed_token_ids]] = -np.inf
    for *before, last in params.bad_words:
        if said[len(said) - len(before) :] == before:
            row[last] = -np.inf
    if len(said) < params.min_tokens:
        row[[*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))]] = -np.inf


def twin(logits: torch.Tensor, slot: Slot) -> int:
    """The definitions, with a full sort."""
    params, row = slot.params, logits.double().numpy().copy()
    known = slot.token_ids[: slot.num_tokens].tolist()
    said = known[slot.num_prompt_tokens :]
    for token in set(known):
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token in set(said):
        row[token] -= params.presence_penalty + params.frequency_penalty * said.count(token)
    for token, bias in params.logit_bias:
        row[token] += bias
    bar(row, params, said)
    if params.temperature == 0:
        return int(row.argmax())
    probs = np.exp((row - row.max()) / params.temperature)
    probs /= probs.sum()
    keep = np.ones(len(probs), dtype=bool)
    if params.top_k > 0:
        keep &= probs >= np.sort(probs)[-min(params.top_k, len(probs))]
    if params.top_p < 1:
        left = np.where(keep, probs, 0) / probs[keep].sum()
        order = np.argsort(-left, kind="stable")
        reached = int(np.searchsorted(np.cumsum(left[order]), params.top_p))
        keep &= left >= left[order[min(reached, len(order) - 1)]]
    keep &= probs >= params.min_p * probs.max()
    cdf = np.cumsum(np.where(keep, probs, 0))
    u = uniform([params.seed or 0], [slot.choice], [slot.num_tokens])[0]
    return int(np.searchsorted(cdf, u * cdf[-1], side="right"))


RANDOM = [
    {},
    {"temperature": 0.3},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 600},
    {"top_k": 100_000},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.7},
    {"top_k": 700, "top_p": 0.9},
    {"top_p": 0.9, "min_p": 0.2},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.02, "temperature": 0.8},
    {"top_k": 500, "top_p": 0.6, "min_p": 0.1, "temperature": 1.9},
]
EDITS = [
    {"repetition_penalty": 1.5},
    {"presence_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"logit_bias": ((1000, 100.0), (4, -100.0))},
    {"logit_bias": ((1000, 9.0), (1000, 9.0))},
    {"min_tokens": 10, "stop_token_ids": (12, 13)},
    {"allowed_token_ids": (7, 40, 1000, 1530)},
    {"allowed_token_ids": (7, 40, 1000), "bad_words": ((40,), (20, 21, 1000), (21, 20, 7))},
    {"bad_words": tuple((20, 21, last) for last in range(200))},
    {"bad_words": ((11, 20, 20, 21, 40), (1,) * 8), "allowed_token_ids": (40,)},
]
ALL = [*RANDOM, *({"temperature": 0.0, **edit} for edit in EDITS), *EDITS]


@pytest.mark.parametrize("fields", ALL, ids=str)
def test_agrees_with_the_definitions(fields: dict[str, object]) -> None:
    for seed in range(25):
        slot = make_slot(SamplingParams(seed=seed, **fields))
        logits = make_logits(1, seed)[0]
        assert run_one(logits, slot) == twin(logits, slot)


@pytest.mark.parametrize("vocab", [5, 511, 512, 513, 1024, 1531])
def test_any_width_of_the_vocabulary(vocab: int) -> None:
    for seed in range(20):
        for fields in ({}, {"top_k": 3}, {"top_p": 0.8}, {"top_p": 0.8, "top_k": 4, "min_p": 0.1}):
            slot = make_slot(SamplingParams(seed=seed, **fields), tokens=[0, 1, 2, 3, 4])
            logits = make_logits(1, seed, vocab)[0]
            assert run_one(logits, slot) == twin(logits, slot)


def test_the_last_tokens_of_the_vocabulary_can_be_drawn() -> None:
    logits = torch.full((VOCAB,), -50.0)
    logits[VOCAB - 1] = 50.0
    for fields in ({}, {"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.5}):
        assert run_one(logits, make_slot(SamplingParams(seed=1, **fields))) == VOCAB - 1


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    slots = [make_slot(SamplingParams(seed=i, logprobs=i % 4, **fields), choice=i % 3) for i, fields in enumerate(ALL)]
    logits = make_logits(len(slots))
    together = sample(logits.clone(), slots, (EOS,))
    for i, slot in enumerate(slots):
        alone = sample(logits[i : i + 1].clone(), [slot], (EOS,))
        assert alone.token_ids == [together.token_ids[i]]
        assert alone.logprobs[0] == together.logprobs[i]


def test_many_rows_of_a_large_vocabulary_are_bitwise_their_own() -> None:
    """Rows of real width: here the library would split sums over threads by the number of rows, if
    we let it."""
    slots = [make_slot(SamplingParams(seed=i, logprobs=3, temperature=0.9)) for i in range(16)]
    logits = make_logits(16, 3, 49152)
    together = sample(logits.clone(), slots, (EOS,))
    for i, slot in enumerate(slots):
        alone = sample(logits[i : i + 1].clone(), [slot], (EOS,))
        assert (alone.token_ids[0], alone.logprobs[0]) == (together.token_ids[i], together.logprobs[i])


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, math.log(2.0), -torch.inf, math.log(5.0)])
    slots = [make_slot(SamplingParams(seed=i), tokens=[0]) for i in range(8000)]
    drawn = sample(logits.repeat(8000, 1), slots, ()).token_ids
    share = np.bincount(drawn, minlength=4) / 8000
    assert share[2] == 0
    # Four standard deviations of a share of 8000 draws are at most 0.0224.
    np.testing.assert_allclose(share, [1 / 8, 2 / 8, 0, 5 / 8], atol=0.0224)


def test_noise_is_uniform_and_depends_on_each_argument() -> None:
    count = 100_000
    noise = uniform([1] * count, [0] * count, range(count))
    assert noise.min() >= 0
    assert noise.max() < 1
    # chi-square of 100 cells, 99 degrees of freedom: 160 is far beyond the 99.99 % point (150).
    cells = np.histogram(noise, bins=100, range=(0, 1))[0]
    assert ((cells - count / 100) ** 2 / (count / 100)).sum() < 160
    assert len({float(uniform([s], [c], [p])[0]) for s in (-1, 0, 1) for c in (0, 1) for p in (0, 1)}) == 12
    assert abs(np.corrcoef(noise, uniform([2] * count, [0] * count, range(count)))[0, 1]) < 0.02
    assert abs(np.corrcoef(noise[1:], noise[:-1])[0, 1]) < 0.02
    assert abs(np.corrcoef(noise, uniform([1] * count, [1] * count, range(count)))[0, 1]) < 0.02


def test_noise_is_fixed_for_ever() -> None:
    """A stream continued by another version of the server must draw the same numbers."""
    expected = [0.2582654469187293, 0.5164512320070013]
    np.testing.assert_array_equal(uniform([0, -5], [0, 3], [1, 4000]), expected)


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(VOCAB)
    logits[[30, 900]] = 4.0
    assert run_one(logits, make_slot(SamplingParams(temperature=0.0))) == 30


def test_ties_at_the_border_all_stay() -> None:
    logits = torch.full((VOCAB,), -20.0)
    logits[[10, 20, 30]] = 1.0
    for fields in ({"top_k": 1}, {"top_p": 0.2}):
        slots = [make_slot(SamplingParams(seed=i, **fields)) for i in range(100)]
        assert set(sample(logits.repeat(100, 1), slots, ()).token_ids) == {10, 20, 30}


def test_a_tiny_temperature_is_greedy() -> None:
    logits = make_logits(1)[0]
    assert run_one(logits, make_slot(SamplingParams(seed=1, temperature=1e-300))) == int(logits.argmax())


def test_min_tokens_masks_ends_until_reached() -> None:
    logits = torch.zeros(VOCAB)
    logits[EOS], logits[12], logits[40] = 9.0, 8.0, 7.0
    params = {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": (12,)}
    assert run_one(logits, make_slot(SamplingParams(**params), tokens=[1, 2, 3, 4, 5, 6], num_prompt=4)) == 40
    assert run_one(logits, make_slot(SamplingParams(**params), tokens=[1, 2, 3, 4, 5, 6, 8], num_prompt=4)) == EOS
    ignoring = SamplingParams(**params, ignore_eos=True)
    assert run_one(logits, make_slot(ignoring, tokens=[1, 2, 3, 4, 5], num_prompt=4)) == EOS


def test_logprobs_are_the_models_own() -> None:
    logits = make_logits(1)
    params = SamplingParams(
        seed=4, temperature=0.5, logprobs=3, logit_bias=((99, 100.0),), repetition_penalty=2.0, top_k=5
    )
    expected = logits[0].double().log_softmax(-1)
    result = sample(logits.clone(), [make_slot(params)], (EOS,))
    assert result.token_ids == [99]
    entry = result.logprobs[0]
    assert entry.token_id == 99
    assert entry.logprob == pytest.approx(float(expected[99]), abs=1e-5)
    best = expected.topk(3)
    assert [token for token, _ in entry.top] == best.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_equal_logprobs_are_ranked_by_token_id() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [1400, 800, 20]] = 5.0
    entry = rank(logits.log_softmax(-1), [0], [5])[0]
    assert [token for token, _ in entry.top] == [20, 800, 1400, 0, 1]


def test_torch_has_its_threads_again_afterwards() -> None:
    torch.set_num_threads(2)
    try:
        sample(make_logits(1), [make_slot(SamplingParams())], ())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_row_of_nonsense_fails_alone() -> None:
    slots = [make_slot(SamplingParams(seed=i, logprobs=2)) for i in range(5)]
    logits = make_logits(5)
    expected = sample(logits.clone(), slots, (EOS,))
    logits[1, 5] = torch.nan
    logits[3] = -torch.inf
    result = sample(logits, slots, (EOS,))
    assert set(result.failed) == {1, 3}
    assert set(result.logprobs) == {0, 2, 4}
    for i in (0, 2, 4):
        assert (result.token_ids[i], result.logprobs[i]) == (expected.token_ids[i], expected.logprobs[i])


def test_a_failure_names_who_left_no_token() -> None:
    ends = SamplingParams(seed=1, min_tokens=30, stop_token_ids=(3, 4))
    only_ends = torch.full((VOCAB,), -torch.inf)
    only_ends[[3, EOS]] = 1.0
    nothing = torch.full((VOCAB,), -torch.inf)
    nonsense = only_ends.clone()
    nonsense[9] = torch.nan
    logits = torch.stack([only_ends, nothing, nonsense, nothing, only_ends])
    slots = [
        make_slot(ends),
        make_slot(ends),
        make_slot(ends),
        make_slot(SamplingParams(seed=1)),
        make_slot(SamplingParams(seed=1)),
    ]
    failed = sample(logits, slots, (EOS,)).failed
    kinds = [type(failed.get(i)) for i in range(5)]
    assert kinds == [InvalidRequestError, *[EngineError] * 3, type(None)]
    # All of a small vocabulary may be masked.
    nothing_left = sample(torch.zeros(1, 5), [make_slot(ends, tokens=[0, 1])], (0, 1, 2)).failed[0]
    assert (nothing_left.status, nothing_left.code) == (400, "no_token_left")


def test_the_smallest_repetition_penalty_does_not_overflow() -> None:
    logits = make_logits(1) * 1e30
    for temperature in (0.0, 1.0):
        run_one(logits[0], make_slot(SamplingParams(seed=1, repetition_penalty=0.01, temperature=temperature)))


def test_a_row_left_without_a_token_fails_alone() -> None:
    """An id outside the vocabulary cannot pass the request's checks; should it come all the same,
    it hurts one row."""
    bad = make_slot(SamplingParams(seed=1, logit_bias=((VOCAB, 1.0),)))
    good = make_slot(SamplingParams(seed=2))
    logits = make_logits(2)
    result = sample(logits.clone(), [bad, good], (EOS,))
    assert set(result.failed) == {0}
    assert result.token_ids[1] == run_one(logits[1], good)
