"""From logits to one token per row, each row with its own parameters.

Semantics, in this order: repetition, presence and frequency penalties; logit bias; the masks of the
grammar, `allowed_token_ids`, `bad_words` and `min_tokens`; temperature; top-k; top-p; min-p. Then
one uniform number u in [0, 1) selects the token: the first, in token-id order, where the cumulative
weight of the remaining tokens exceeds u times their sum.

- Repetition penalty counts prompt and output tokens. It divides positive logits and multiplies
  negative ones (Keskar et al., CTRL, 2019). Presence and frequency penalties count output tokens
  and are subtracted (OpenAI's definition).
- top-k keeps every token at least as likely as the k-th. top-p then keeps the most likely tokens up
  to and including the one where their sum, relative to the sum after top-k, reaches p (Holtzman et
  al., 2020). min-p keeps tokens at least min_p times as likely as the best. Each is a threshold on
  the probability, so all tokens tied at it are kept.
- Greedy rows take the largest logit, and the lowest token id of equal ones.
- Log-probabilities are the model's own, computed before all of the above. Equal ones are ranked by
  token id.

A row's result is a function of its own logits, parameters and history. Every tensor operation here
is either rounded per element or reduces along one row in a fixed order, and nothing batch-wide
(such as a common k) changes a result. Noise is a function of (seed, choice, position); see `noise`.
Does not decide when a request ends or what tokens mean.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serve_app.core.results import TokenLogprob
from serve_app.errors import EngineError, InvalidRequestError, RequestError
from serve_app.grammars.token_set import TokenSet
from serve_app.model.sampling.columns import Column
from serve_app.model.sampling.grammar_masks import mask_out
from serve_app.model.sampling.noise import Float64Array, Int64Array
from serve_app.model.sampling.rows import Slot

NO_MASKS: Mapping[int, TokenSet] = {}
# Number of parts per row when searching a lower bound of the k-th value.
_NUM_PARTS = 512


class PendingSample(Protocol):
    """Sampled tokens that the device may still be computing."""

    @property
    def token_ids(self) -> Sequence[int] | Tensor:
        """One token id per row; int64 [R] on the device while it computes them. Negative for rows
        that failed.
        """
        ...

    def resolve(self) -> "Sampled":
        """Wait for the results."""
        ...


@dataclass(frozen=True, slots=True)
class Sampled:
    """Results by row of the logits. `token_ids[i]` is meaningless if `failed` contains i."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    failed: dict[int, RequestError] = field(default_factory=dict)

    def resolve(self) -> "Sampled":
        """Return itself: the results are known."""
        return self

    def accept(self, first: int, drafts: Sequence[int]) -> range:
        """Return the indices of the accepted tokens of a row with `drafts`, starting at `first`:
        those that follow correct drafts.

        Empty if the first token failed. A later failure is not reported yet: the next step starts
        there.
        """
        for index, draft in enumerate(drafts, first):
            if index in self.failed:
                return range(first, index)
            if self.token_ids[index] != draft:
                return range(first, index + 1)
        last = first + len(drafts)
        return range(first, last if last in self.failed else last + 1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch without helper threads.

    torch's parallel loops wait for all threads. On a busy machine, waiting for a thread that is not
    scheduled costs more than all of sampling. Idle threads that spin take a core from the kernels.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def why_failed(emptied: bool) -> RequestError:
    """Return the error of a row without a token. emptied: the request's own parameters excluded all
    tokens. Otherwise its logits were not finite.
    """
    if emptied:
        return InvalidRequestError("the sampling parameters allow no token", code="no_token_left")
    return EngineError("the model's logits for the next token are not finite")


@one_thread()
def sample(
    logits: Tensor,
    slots: Sequence[Slot],
    parameters: Float64Array,
    eos_token_ids: Sequence[int],
    masks: Mapping[int, TokenSet] = NO_MASKS,
) -> Sampled:
    """Choose one token per row.

    logits: [R, vocab] float32 or float64, changed in place; slots: R, where row i continues
    slots[i]; parameters: float64 [R, len(Column)]; masks: token sets that grammars allow, by row.
    Rows with logits that are not finite, or without an allowed token, are reported in `failed`.
    """
    failed: dict[int, RequestError] = {}
    masked: dict[int, Tensor | None] = {}
    wanted = [i for i, slot in enumerate(slots) if slot.params.logprobs is not None]
    raw = _take(logits, wanted).log_softmax(-1) if wanted else None
    for i, slot in enumerate(slots):
        try:
            masked[i] = _edit(logits[i], slot, eos_token_ids, masks.get(i))
        except (RuntimeError, IndexError, ValueError) as error:
            failed[i] = EngineError(f"sampling failed: {error}")
    best, token_ids = _most_likely(logits)
    for i in (~best.isfinite()).nonzero()[:, 0].tolist():
        # The mask emptied the row if it removed a token that the model allowed.
        taken = masked.get(i)
        has_mask = i in masks or is_masked(slots[i])
        emptied = bool(best[i] == -torch.inf) and (has_mask or (taken is not None and bool(taken.isfinite().any())))
        failed.setdefault(i, why_failed(emptied))
    drawn = [i for i in parameters[:, Column.TEMPERATURE].nonzero()[0].tolist() if i not in failed]
    if drawn:
        for i, token_id in zip(drawn, _draw(_take(logits, drawn), parameters[drawn]), strict=True):
            token_ids[i] = token_id
    wanted_ok = [(j, i) for j, i in enumerate(wanted) if i not in failed]
    logprobs: dict[int, TokenLogprob] = {}
    if raw is not None and wanted_ok:
        rows = [i for _, i in wanted_ok]
        ranked = rank(
            _take(raw, [j for j, _ in wanted_ok]), [token_ids[i] for i in rows], [_top(slots[i]) for i in rows]
        )
        logprobs = dict(zip(rows, ranked, strict=True))
    return Sampled(token_ids, logprobs, failed)


def rank(logprobs: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """Return each row's token with its log-probability and the `num_top[i]` most likely
    alternatives, best first.

    logprobs: [R, vocab], log-softmaxed.
    """
    index = torch.tensor(token_ids, device=logprobs.device)[:, None]
    chosen: list[float] = logprobs.gather(1, index)[:, 0].tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(chosen)
    rows = [i for i, k in enumerate(num_top) if k]
    if rows:
        parts = _in_parts(_take(logprobs, rows))
        maxima = parts.amax(-1)
        ks = [min(num_top[i], logprobs.shape[1]) for i in rows]
        for i, k, (ids, values) in zip(rows, ks, _at_least(parts, maxima, _kth_floor(maxima, ks)), strict=True):
            order = np.argsort(-values, kind="stable")[:k]
            tops[i] = tuple(zip(ids[order].tolist(), values[order].tolist(), strict=True))
    return [TokenLogprob(t, p, top) for t, p, top in zip(token_ids, chosen, tops, strict=True)]


def _top(slot: Slot) -> int:
    return slot.params.logprobs or 0


def _is_edited(slot: Slot) -> bool:
    """Whether the slot's next logits are changed before a token is chosen."""
    params = slot.params
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or is_masked(slot)
        or slot.num_output_tokens < params.min_tokens
    )


def costs(slot: Slot) -> tuple[Int64Array, Float64Array]:
    """Return distinct ids and the numbers that presence and frequency penalties add to their
    logits.
    """
    params = slot.params
    if not params.presence_penalty and not params.frequency_penalty:
        return np.empty(0, dtype=np.int64), np.empty(0)
    ids, counts = np.unique(slot.token_ids[slot.num_prompt_tokens : slot.num_tokens], return_counts=True)
    return ids, -params.presence_penalty - params.frequency_penalty * counts.astype(np.float64)


def biases(slot: Slot) -> tuple[Int64Array, Float64Array]:
    """Return distinct ids and the numbers that the bias adds to their logits."""
    bias: dict[int, float] = {}
    for token_id, value in slot.params.logit_bias:
        bias[token_id] = bias.get(token_id, 0.0) + value
    return np.array(list(bias), dtype=np.int64), np.array(list(bias.values()))


def barred(slot: Slot, eos_token_ids: Sequence[int]) -> tuple[Int64Array, Float64Array]:
    """Return the ids that are not allowed before `min_tokens`, and -inf for each."""
    params = slot.params
    if slot.num_output_tokens >= params.min_tokens:
        return np.empty(0, dtype=np.int64), np.empty(0)
    ids = np.array([*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)], dtype=np.int64)
    return ids, np.full(len(ids), -np.inf)


def is_masked(slot: Slot) -> bool:
    """Whether the request itself restricts token ids, at any position of the output."""
    return bool(slot.params.allowed_token_ids or slot.params.bad_words)


def ends_of_bad_words(slot: Slot) -> tuple[Int64Array, Float64Array]:
    """Return the ids that would complete a bad word in the output, and -inf for each."""
    output = slot.token_ids[slot.num_prompt_tokens : slot.num_tokens]
    ids = []
    for word in slot.params.bad_words:
        num_before = len(word) - 1
        if num_before <= len(output) and tuple(output[len(output) - num_before :].tolist()) == word[:-1]:
            ids.append(word[-1])
    return np.array(ids, dtype=np.int64), np.full(len(ids), -np.inf)


def keep_allowed(row: Tensor, slot: Slot) -> None:
    """Keep only `allowed_token_ids`, in place on one row of logits."""
    if slot.params.allowed_token_ids:
        ids = torch.tensor(slot.params.allowed_token_ids, device=row.device)
        allowed = row[ids]
        row.fill_(-torch.inf)
        row[ids] = allowed


def _edit(row: Tensor, slot: Slot, eos_token_ids: Sequence[int], allowed: TokenSet | None) -> Tensor | None:
    """Apply penalties, bias and masks, in place on one row of logits. Return the logits that the
    `min_tokens` mask removed.
    """
    if not _is_edited(slot):
        mask_out(row, allowed)
        return None
    penalty = slot.params.repetition_penalty
    if penalty != 1.0:
        # Repeated ids are written repeatedly, with the same value.
        seen = torch.from_numpy(slot.token_ids[: slot.num_tokens]).to(row.device)
        old = row[seen]
        row[seen] = torch.where(old > 0, old / penalty, old * penalty)
    for ids, numbers in (costs(slot), biases(slot)):
        if ids.size:
            row[torch.from_numpy(ids).to(row.device)] += torch.from_numpy(numbers).to(row.device, row.dtype)
    mask_out(row, allowed)
    keep_allowed(row, slot)
    if slot.params.bad_words:
        row[torch.from_numpy(ends_of_bad_words(slot)[0]).to(row.device)] = -torch.inf
    if slot.num_output_tokens >= slot.params.min_tokens:
        return None
    index = torch.from_numpy(barred(slot, eos_token_ids)[0]).to(row.device)
    masked = row[index]
    row[index] = -torch.inf
    return masked


def _most_likely(logits: Tensor) -> tuple[Tensor, list[int]]:
    """Return each row's largest logit [R] and the first id with it. NaN counts as the largest."""
    if logits.device.type == "cpu":
        # numpy's argmax is several times as fast as torch's, and guarantees the first
        values = logits.numpy()
        first = values.argmax(1)
        return torch.from_numpy(values[np.arange(len(values)), first]), first.tolist()
    parts = _in_parts(logits)
    best, part = parts.amax(-1).max(-1)
    inside = parts.gather(1, part[:, None, None].expand(-1, 1, parts.shape[2]))[:, 0].argmax(-1)
    ids: list[int] = (part * parts.shape[2] + inside).tolist()
    return best, ids


def _draw(logits: Tensor, parameters: Float64Array) -> list[int]:
    """Draw a token per row with its own noise. logits: [R, vocab]; parameters: [R, len(Column)]."""
    temperature = parameters[:, Column.TEMPERATURE]
    if (temperature != 1.0).any():
        logits = logits / torch.from_numpy(temperature).to(logits.device, logits.dtype)[:, None]
    parts = _in_parts(logits)
    probs = parts.flatten(1).softmax(-1).view_as(parts)
    noise = parameters[:, Column.NOISE]
    truncates = _truncates(parameters)
    drawn = [0] * len(parameters)
    whole: list[int] = (~truncates).nonzero()[0].tolist()
    if whole:
        for j, token_id in zip(whole, _invert(_take(probs, whole), noise[whole]), strict=True):
            drawn[j] = token_id
    cut: list[int] = truncates.nonzero()[0].tolist()
    if cut:
        parts = _take(probs, cut)
        maxima = parts.amax(-1)
        floor = _survivor_floor(maxima, parameters[cut], logits.shape[1])
        for j, (ids, weights) in zip(cut, _at_least(parts, maxima, floor), strict=True):
            keep = _truncate(weights, parameters[j])
            drawn[j] = int(ids[keep][_first_above(np.cumsum(weights[keep]), float(noise[j]))])
    return drawn


def _truncates(parameters: Float64Array) -> npt.NDArray[np.bool_]:
    """Return which rows exclude some tokens (top-k, top-p or min-p)."""
    top_k, top_p, min_p = parameters[:, Column.TOP_K], parameters[:, Column.TOP_P], parameters[:, Column.MIN_P]
    found: npt.NDArray[np.bool_] = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    return found


def _take(values: Tensor, rows: list[int]) -> Tensor:
    """Return `values[rows]` for ascending rows, without a copy if that is all of them."""
    return values if len(rows) == len(values) else values[rows]


def _in_parts(values: Tensor) -> Tensor:
    """Reshape [R, vocab] to [R, parts, width], padded with -inf if the width does not divide the
    vocabulary.

    Searching, sorting or summing whole rows is expensive. Sums and maxima of parts show the few
    parts to examine.
    """
    rows, vocab = values.shape
    parts = min(_NUM_PARTS, vocab)
    width = -(-vocab // parts)
    if parts * width > vocab:
        values = torch.nn.functional.pad(values, (0, parts * width - vocab), value=-torch.inf)
    return values.view(rows, parts, width)


def _invert(probs: Tensor, noise: Float64Array) -> list[int]:
    """Invert the CDF over whole rows: first the part, then the token in it. probs: [R, parts,
    width]; noise: R.
    """
    width = probs.shape[2]
    cdf = probs.sum(-1).cumsum(-1, dtype=torch.float64)
    target = torch.from_numpy(noise).to(probs.device)[:, None] * cdf[:, -1:]
    part = _first_above_each(cdf, target)
    before = torch.where(part > 0, cdf.gather(1, (part - 1).clamp_min(0)), 0.0)
    inside = probs.gather(1, part[:, :, None].expand(-1, 1, width))[:, 0].double().cumsum(-1)
    chosen: list[int] = (part * width + _first_above_each(inside, target - before))[:, 0].tolist()
    return chosen


def _first_above_each(cdf: Tensor, target: Tensor) -> Tensor:
    """Return per row the first index where `cdf` exceeds `target`; both [R, ...]. If rounding lifts
    the target to the total, return the last index with a positive weight.
    """
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(cdf, target, right=True), last)


def _first_above(cdf: Float64Array, noise: float) -> int:
    """`_first_above_each` on the host for one row; `noise` is relative to the sum."""
    index = int(np.searchsorted(cdf, noise * cdf[-1], side="right"))
    return min(index, int(np.searchsorted(cdf, cdf[-1])))


def _survivor_floor(maxima: Tensor, parameters: Float64Array, vocab: int) -> Tensor:
    """Return per row [R] a probability below which no token survives truncation. So few tokens need
    a closer look.
    """
    top_k, top_p, min_p = parameters[:, Column.TOP_K], parameters[:, Column.TOP_P], parameters[:, Column.MIN_P]
    unlimited = top_k == 0
    floor = _kth_floor(maxima, np.where(unlimited, vocab + 1, top_k).astype(int).tolist())
    # Tokens below (1 - top_p) / vocab together weigh less than the tokens that top-p removes. After
    # top-k, neither this limit nor min-p may remove tokens: top-p needs the sum of all tokens that
    # top-k kept. The factors of 1/2 leave room for rounding.
    by_top_p = np.where(unlimited, (1.0 - top_p) / (2.0 * vocab), 0.0)
    by_min_p = np.where(unlimited | (top_p == 1.0), min_p / 2.0, 0.0)
    host = torch.from_numpy(np.stack([by_top_p, by_min_p])).to(floor.device, floor.dtype)
    return torch.maximum(floor, torch.maximum(host[0], host[1] * maxima.amax(-1)))


def _truncate(weights: Float64Array, line: Float64Array) -> npt.NDArray[np.bool_]:
    """Return which of a row's surviving tokens remain after top-k, top-p and min-p. weights:
    probabilities in token order; line: the row's parameters, [len(Column)].
    """
    top_k, top_p = int(line[Column.TOP_K]), line[Column.TOP_P]
    threshold = line[Column.MIN_P] * weights.max()
    mass = 1.0
    if top_k > 0:
        if top_k < len(weights):
            kth = np.partition(weights, -top_k)[-top_k]
            threshold = max(threshold, kth)
            weights = np.where(weights >= kth, weights, 0.0)
        mass = weights.sum()
    if top_p < 1.0:
        ordered = np.sort(weights)[::-1]
        reached = int(np.searchsorted(np.cumsum(ordered), top_p * mass))
        threshold = max(threshold, ordered[min(reached, len(ordered) - 1)])
    keep: npt.NDArray[np.bool_] = weights >= threshold
    return keep


def _kth_floor(maxima: Tensor, ks: Sequence[int]) -> Tensor:
    """Return a lower bound of each row's k-th largest value, [R]: the k-th largest maximum of its
    parts, or -inf if k exceeds their number.

    maxima: [R, parts].
    """
    ordered = maxima.sort(-1, descending=True).values
    ordered = torch.nn.functional.pad(ordered, (0, 1), value=-torch.inf)
    index = torch.tensor([min(k - 1, maxima.shape[1]) for k in ks], device=maxima.device)
    return ordered.gather(1, index[:, None])[:, 0]


def _at_least(parts: Tensor, maxima: Tensor, floor: Tensor) -> list[tuple[Int64Array, Float64Array]]:
    """Return for each row the ids (ascending) and values of the tokens at or above the row's floor,
    on the host.
    """
    row, part = (maxima >= floor[:, None]).nonzero(as_tuple=True)
    look = parts[row, part]
    hit, offset = (look >= floor[row, None]).nonzero(as_tuple=True)
    values = look[hit, offset].double().cpu().numpy()
    ids = (part[hit] * parts.shape[2] + offset).cpu().numpy()
    ends = np.cumsum(np.bincount(row[hit].cpu().numpy(), minlength=len(parts)))[:-1]
    return list(zip(np.split(ids, ends), np.split(values, ends), strict=True))
