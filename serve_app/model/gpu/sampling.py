"""Sampling on the device, for rows with any mixture of parameters. Nothing waits for the device.

The host sends the data that only it has: parameters, each row's random number, and the logits
changed by bias and `min_tokens`. Penalties count tokens on the device, where the host may not know
the last one. Results stay on the device until they are requested. The semantics are those of
`sampling.sampler`; `agrees` compares the kernels with it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from serve_app.core.results import TokenLogprob
from serve_app.core.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from serve_app.core.step_plan import SlotStart
from serve_app.errors import RequestError
from serve_app.grammars.token_set import TokenSet
from serve_app.model.gpu.kernels import sampling as kernels
from serve_app.model.input_batch import sampling_rows
from serve_app.model.sampling import sampler
from serve_app.model.sampling.noise import Float64Array, Int64Array
from serve_app.model.sampling.rows import SamplingRows
from serve_app.model.sampling.sampler import Sampled
from serve_app.model.transfer import ToHost, to_device

PART = 1024
"""Tokens per part."""
_WAYS = 16
_SPARE = 12
"""Extra top tokens that are fetched, so that equal log-probabilities can be ranked by token id."""
_NOTHING_LEFT = -2
"""Token id from `draw` for a row whose largest logit is -inf."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that the device has chosen or will choose. token_ids: int64 [R], negative for rows
    that failed.
    """

    token_ids: Tensor
    _num_top: dict[int, int]
    """Number of alternatives, by row that requests log-probabilities."""
    _masked: set[int]
    """Rows with masked tokens."""
    _arriving: ToHost

    def resolve(self) -> Sampled:
        """Wait for the results and return them."""
        ids, *rest = self._arriving.wait()
        token_ids: list[int] = ids.tolist()
        failed = {i: self._why(i, token_id) for i, token_id in enumerate(token_ids) if token_id < 0}
        logprobs: dict[int, TokenLogprob] = {}
        if self._num_top:
            chosen, values, tops = (tensor.numpy() for tensor in rest)
            # Rank equal log-probabilities by id.
            order = np.lexsort((tops, -values))[:, :MAX_TOP_LOGPROBS]
            values, tops = (np.take_along_axis(array, order, 1) for array in (values, tops))
            for j, (i, count) in enumerate(self._num_top.items()):
                top = tuple(zip(tops[j, :count].tolist(), values[j, :count].tolist(), strict=True))
                logprobs[i] = TokenLogprob(token_ids[i], float(chosen[j]), top)
        return Sampled(token_ids, {i: entry for i, entry in logprobs.items() if i not in failed}, failed)

    def _why(self, row: int, token_id: int) -> RequestError:
        return sampler.why_failed(token_id == _NOTHING_LEFT and row in self._masked)


def sample_plain(hidden: Tensor, parameters: Float64Array, choose_from: Callable[[Tensor, Tensor], Tensor]) -> Drawn:
    """Choose one token for each of R plain rows. choose_from: maps hidden states [R, width] and
    parameters to ids.
    """
    return chosen(choose_from(hidden, to_device(parameters, hidden.device)))


def chosen(token_ids: Tensor) -> Drawn:
    """Start copying the tokens of plain rows to the host."""
    return Drawn(token_ids, {}, set(), ToHost(token_ids))


def sample(logits: Tensor, rows: SamplingRows, history: Tensor, eos_token_ids: Sequence[int]) -> Drawn:
    """Choose one token per row. logits: float32 [R, vocab], changed in place. history: as in
    `penalize`.
    """
    slots = rows.states()
    num_top = {i: slot.params.logprobs for i, slot in enumerate(slots) if slot.params.logprobs is not None}
    masked = {i for i, slot in enumerate(slots) if slot.num_output_tokens < slot.params.min_tokens}
    raw = None
    if num_top:
        shown = to_device(np.array(list(num_top)), logits.device)
        raw = logits[shown].log_softmax(-1)
    penalize(logits, rows, history)
    add(logits, rows, [(i, sampler.biases(slot)) for i, slot in enumerate(slots) if slot.params.logit_bias])
    mask_out(logits, rows.masks)
    for i, slot in enumerate(slots):
        sampler.keep_allowed(logits[i], slot)
    add(logits, rows, [(i, sampler.ends_of_bad_words(slot)) for i, slot in enumerate(slots) if slot.params.bad_words])
    add(logits, rows, [(i, sampler.barred(slots[i], eos_token_ids)) for i in masked])
    masked |= rows.masks.keys() | {i for i, slot in enumerate(slots) if sampler.is_masked(slot)}
    token_ids = choose(logits, to_device(rows.parameters, logits.device))
    if raw is None:
        return Drawn(token_ids, num_top, masked, ToHost(token_ids))
    chosen = raw.gather(1, token_ids[shown, None].clamp_min(0))[:, 0]
    top = raw.topk(min(MAX_TOP_LOGPROBS + _SPARE, raw.shape[1]))
    return Drawn(token_ids, num_top, masked, ToHost(token_ids, chosen, top.values, top.indices))


def choose(logits: Tensor, params: Tensor) -> Tensor:
    """Return token ids, int64 [R], for logits [R, vocab] and parameters [R, len(Column)]; negative
    for rows that failed. Kernel launches only, so that a CUDA graph can capture it.
    """
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


def penalize(logits: Tensor, rows: SamplingRows, history: Tensor) -> None:
    """Apply repetition, presence and frequency penalties to logits [R, vocab], in place.

    history: int32 [slots, positions], with the first `num_tokens` ids of every row that has
    penalties. The work is the number of those rows times the longest history among them.
    """
    found = [i for i, slot in enumerate(rows.slots) if slot.params.has_penalties]
    if not found:
        return
    num_tokens = rows.num_tokens[found]
    slots = [rows.slots[i] for i in found]
    host = np.stack([found, rows.seq_slots[found], num_tokens, [slot.num_prompt_tokens for slot in slots]])
    row, seq_slot, end, prompt = to_device(host, logits.device)[..., None]
    penalties = np.array(
        [(s.params.repetition_penalty, s.params.presence_penalty, s.params.frequency_penalty) for s in slots]
    )
    repetition, presence, frequency = to_device(penalties.T.copy(), logits.device)[..., None]
    place = torch.arange(int(num_tokens.max()), device=logits.device)
    ids = history[seq_slot[:, 0], : len(place)].long()
    # Repeated ids are written repeatedly, with the same value. Padding repeats the first id.
    ids = torch.where(place < end, ids, ids[:, :1])
    old = logits[row, ids]
    repeated = repetition.to(logits.dtype)
    old = torch.where(old > 0, old / repeated, old * repeated)
    counts = torch.zeros(len(found), logits.shape[1], dtype=torch.int32, device=logits.device)
    counts.scatter_add_(1, ids, ((place >= prompt) & (place < end)).int())
    said = counts.gather(1, ids).double()
    cost = torch.where(said > 0, -presence - frequency * said, 0.0)
    logits[row, ids] = old + cost.to(logits.dtype)


def mask_out(logits: Tensor, masks: Mapping[int, TokenSet]) -> None:
    """Apply grammar masks, by row, in place to logits float32 [R, vocab]. All masks are sent in one
    copy.
    """
    if not masks:
        return
    vocab = logits.shape[1]
    packed = [row.to_bytes(3, "little") + allowed.packed for row, allowed in masks.items()]
    lines = to_device(np.frombuffer(bytearray().join(packed), dtype=np.uint8), logits.device)
    grid = (len(masks), triton.cdiv(vocab, PART))
    kernels.mask_out[grid](logits, lines, vocab, len(packed[0]), PART=PART, num_warps=4)


def add(logits: Tensor, rows: SamplingRows, entries: Sequence[tuple[int, tuple[Int64Array, Float64Array]]]) -> None:
    """Add numbers to logits [R, vocab] in place. entries: a row, its ids and their numbers. Only
    -inf may occur twice for an id. Raises IndexError for ids out of range.
    """
    if not entries:
        return
    vocab = logits.shape[1]
    found = []
    for row, (ids, numbers) in entries:
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab:
            raise IndexError(f"a token id of {rows.slots[row].request_id!r} is outside the vocabulary")
        found.append(np.stack([row * vocab + ids, numbers]))
    where, numbers = to_device(np.concatenate(found, axis=1), logits.device)
    logits.view(-1)[where.long()] += numbers.to(logits.dtype)


def agrees(vocab: int, device: torch.device) -> bool:
    """Whether the kernels choose the same tokens as `serve_app.model.sampling.sampler`, on random
    logits of this width.
    """
    variants = [
        {"temperature": 0.0},
        {},
        {"top_k": 20},
        {"top_p": 0.8, "temperature": 0.7},
        {"min_p": 0.05},
        {"allowed_token_ids": (0, 2)},
        {"bad_words": ((0,), (1, 2)), "top_k": 3},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2, "logprobs": 3},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 0.0},
        {"repetition_penalty": 1.5, "temperature": 0.0},
    ]
    starts = [
        SlotStart(slot, "", 0, (0, 1, 1), 1, SamplingParams(seed=slot, **fields), ())  # type: ignore[arg-type]
        for slot, fields in enumerate(variants)
    ]
    rows = sampling_rows(starts)
    rows.masks[2] = TokenSet(b"\xaa" * (vocab // 8) + bytes(-(-vocab // 8) - vocab // 8), vocab)
    history = torch.tensor([start.token_ids for start in starts], dtype=torch.int32, device=device)
    logits = 3 * torch.randn(len(starts), vocab, generator=torch.Generator().manual_seed(0))
    # Here penalties decide between prompt token 0 and output token 1, which has the larger logit.
    # In the first row the penalty of 1 makes 0 win; in the second both are penalized and 2 wins.
    logits[-2:, :3] = torch.tensor([[20.0, 21.5, 0.0], [21.0, 21.5, 15.0]])
    expected = sampler.sample(logits.clone(), rows.slots, rows.parameters, (), rows.masks)
    return sample(logits.to(device), rows, history, ()).resolve().token_ids == expected.token_ids
