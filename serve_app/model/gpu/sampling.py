"""Sampling on the device, for rows of any mixture of parameters, with nothing that waits for the device.

The host says what only it knows: parameters, each row's random number, and which logits penalties, bias and
`min_tokens` change (all as arrays, in one copy). What the device finds stays there, and comes to the host when
somebody asks. Semantics are those of `serve_app.model.sampler`, whose results `agrees` compares with the kernels'.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from serve_app.core.output import TokenLogprob
from serve_app.core.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from serve_app.model import sampler
from serve_app.model.gpu.kernels import sampling as kernels
from serve_app.model.input_batch import Slot
from serve_app.model.sampler import Float64Array, Sampled
from serve_app.model.transfer import ToHost, to_device

PART = 1024
"""Tokens of a part."""
_WAYS = 16
_SPARE = 12
"""More of the most likely tokens are fetched than may be asked for, so that equal ones can be ranked by their ids."""
_NOTHING_LEFT = -2
"""What `draw` leaves in the place of a token where the largest logit is -inf."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that the device chooses, or has chosen. token_ids: int64 [R], negative where a row failed."""

    token_ids: Tensor
    _num_top: dict[int, int]
    """Of the rows that want log-probabilities, how many alternatives."""
    _masked: set[int]
    """Rows that may not end yet."""
    _arriving: ToHost

    def resolve(self) -> Sampled:
        """The results on the host, once they are there."""
        ids, *rest = self._arriving.wait()
        token_ids: list[int] = ids.tolist()
        failed = {i: self._why(i, token_id) for i, token_id in enumerate(token_ids) if token_id < 0}
        logprobs: dict[int, TokenLogprob] = {}
        if self._num_top:
            chosen, values, tops = (tensor.numpy() for tensor in rest)
            # Equal ones by id.
            order = np.lexsort((tops, -values))[:, :MAX_TOP_LOGPROBS]
            values, tops = (np.take_along_axis(array, order, 1) for array in (values, tops))
            for j, (i, count) in enumerate(self._num_top.items()):
                top = tuple(zip(tops[j, :count].tolist(), values[j, :count].tolist(), strict=True))
                logprobs[i] = TokenLogprob(token_ids[i], float(chosen[j]), top)
        return Sampled(token_ids, {i: entry for i, entry in logprobs.items() if i not in failed}, failed)

    def _why(self, row: int, token_id: int) -> str:
        return sampler.NO_TOKEN if token_id == _NOTHING_LEFT and row in self._masked else sampler.NOT_FINITE


def plain(slots: Sequence[Slot]) -> bool:
    """Whether nothing changes the rows' logits and nobody wants to see them."""
    return not any(slot.params.logprobs is not None or sampler.edited(slot) for slot in slots)


def sample_plain(hidden: Tensor, slots: Sequence[Slot], choose_from: Callable[[Tensor, Tensor], Tensor]) -> Drawn:
    """Choose one token for each row of `plain` slots. choose_from: hidden states [R, width] and `parameters` to ids."""
    token_ids = choose_from(hidden, to_device(parameters(slots), hidden.device))
    return Drawn(token_ids, {}, set(), ToHost(token_ids))


def sample(logits: Tensor, slots: Sequence[Slot], eos_token_ids: Sequence[int]) -> Drawn:
    """Choose one token for each row. logits: float32 [R, vocab], changed in place; row i continues slots[i]."""
    num_top = {i: slot.params.logprobs for i, slot in enumerate(slots) if slot.params.logprobs is not None}
    masked = {i for i, slot in enumerate(slots) if slot.num_output_tokens < slot.params.min_tokens}
    raw = None
    if num_top:
        rows = to_device(np.array(list(num_top)), logits.device)
        raw = logits[rows].log_softmax(-1)
    edit(logits, slots, eos_token_ids)
    token_ids = choose(logits, to_device(parameters(slots), logits.device))
    if raw is None:
        return Drawn(token_ids, num_top, masked, ToHost(token_ids))
    chosen = raw.gather(1, token_ids[rows, None].clamp_min(0))[:, 0]
    top = raw.topk(min(MAX_TOP_LOGPROBS + _SPARE, raw.shape[1]))
    return Drawn(token_ids, num_top, masked, ToHost(token_ids, chosen, top.values, top.indices))


def parameters(slots: Sequence[Slot]) -> Float64Array:
    """What `choose` needs of each row: [R, 5], temperature (0: greedy), top_k (0: all), top_p, min_p, noise."""
    values = np.array([_numbers(slot.params) for slot in slots], dtype=np.float64)
    noise = sampler.uniform(
        [slot.params.seed or 0 for slot in slots],
        [slot.choice for slot in slots],
        [slot.num_tokens for slot in slots],
    )
    return np.column_stack([values, noise])


def choose(logits: Tensor, params: Tensor) -> Tensor:
    """Token ids, int64 [R], of logits [R, vocab] by `parameters` [R, 5]; negative where there is none. Kernel launches
    only, so that a CUDA graph can hold it."""
    rows, vocab = logits.shape
    parts = -(-vocab // PART)
    maxima = logits.new_empty(rows, parts, dtype=torch.float32)
    sums = torch.empty_like(maxima)
    firsts = torch.empty_like(maxima, dtype=torch.int32)
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    kernels.scan_parts[(rows, parts)](logits, params, maxima, firsts, sums, vocab, parts, PART=PART, num_warps=4)
    kernels.draw[(rows,)](
        logits, params, maxima, firsts, sums, token_ids, vocab, parts,
        PART=PART, PARTS=triton.next_power_of_2(parts), WAYS=_WAYS, num_warps=8,
    )  # fmt: skip
    return token_ids


def edit(logits: Tensor, slots: Sequence[Slot], eos_token_ids: Sequence[int]) -> None:
    """Penalties, bias and the `min_tokens` mask on logits [R, vocab], in place. Raises IndexError for ids outside."""
    rows = [(row, slot) for row, slot in enumerate(slots) if sampler.edited(slot)]
    if not rows:
        return
    vocab = logits.shape[1]
    # Per kind of edit: positions in the flattened logits, and a number for each.
    repeated, cost, bias, barred = (
        _collect(rows, vocab, entries)
        for entries in (
            sampler.repeated,
            sampler.costs,
            sampler.biases,
            lambda slot: sampler.barred(slot, eos_token_ids),
        )
    )
    joined = to_device(np.concatenate([repeated, cost, bias, barred], axis=1), logits.device)
    sizes = [part.shape[1] for part in (repeated, cost, bias, barred)]
    flat = logits.view(-1)
    for kind, part in enumerate(torch.split(joined, sizes, dim=1)):
        if sizes[kind]:
            index, number = part[0].long(), part[1].to(logits.dtype)
            old = flat[index]
            # An id that is repeated twice is written twice, with the same value.
            new = torch.where(old > 0, old / number, old * number) if kind == 0 else old + number
            flat[index] = new


def _collect(
    rows: list[tuple[int, Slot]], vocab: int, entries: Callable[[Slot], tuple[sampler.Int64Array, Float64Array]]
) -> Float64Array:
    """[2, n]: places in the flattened logits and the numbers that belong there."""
    found = []
    for row, slot in rows:
        ids, numbers = entries(slot)
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab:
            raise IndexError(f"a token id of {slot.request_id!r} is outside the vocabulary")
        found.append(np.stack([row * vocab + ids, numbers]))
    return np.concatenate(found, axis=1)


def agrees(vocab: int, device: torch.device) -> bool:
    """Whether the kernels choose what `serve_app.model.sampler` chooses, on random logits of this width."""
    variants = [
        {"temperature": 0.0},
        {},
        {"top_k": 20},
        {"top_p": 0.8, "temperature": 0.7},
        {"min_p": 0.05},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2, "logprobs": 3},
    ]
    slots = [
        Slot("", 0, SamplingParams(seed=seed, **fields), 0, 1, np.array([1, 0]), [])  # type: ignore[arg-type]
        for seed, fields in enumerate(variants)
    ]
    logits = 3 * torch.randn(len(slots), vocab, generator=torch.Generator().manual_seed(0))
    expected = sampler.sample(logits.clone(), slots, ())
    return sample(logits.to(device), slots, ()).resolve().token_ids == expected.token_ids


def _numbers(params: SamplingParams) -> tuple[float, float, float, float]:
    temperature = 0.0 if params.greedy else max(params.temperature, sampler.MIN_TEMPERATURE)
    return temperature, max(params.top_k, 0), params.top_p, params.min_p
