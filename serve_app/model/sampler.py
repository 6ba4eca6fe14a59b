"""From logits to one token per row, each row by its own parameters.

Semantics, in this order: repetition, presence and frequency penalties; logit bias; `min_tokens` mask; temperature;
top-k; top-p; min-p. Then one uniform number u in [0, 1) decides: the token is the first, in token-id order, at which
the cumulated weight of the tokens left exceeds u times their sum.

- Repetition penalty counts prompt and output tokens and divides positive, multiplies negative logits (Keskar et al.,
  CTRL, 2019); presence and frequency penalties count output tokens and are subtracted (OpenAI's definition).
- top-k keeps every token at least as likely as the k-th; top-p then keeps the most likely ones up to and including the
  one at which their sum, relative to what top-k left, reaches p (Holtzman et al., 2020); min-p keeps what is at least
  min_p times as likely as the best. Each is a threshold on the probability, so tokens tied at it all stay.
- Greedy rows take the largest logit; of equal ones the lowest token id.
- Log-probabilities are the model's own: taken before any of the above. Equal ones are ranked by token id.

A row's result is a function of its own logits, parameters and history: every tensor operation here is either rounded
per element or reduces along one row in a fixed order, and nothing batch-wide (such as a common k) changes a result.
Noise is a function of (seed, choice, position); see `noise`. Not decided here: when a request is finished, and what a
token means.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serve_app.core.output import TokenLogprob
from serve_app.core.sampling_params import SamplingParams
from serve_app.model.input_batch import MIN_TEMPERATURE, Slot
from serve_app.model.noise import Float64Array, Int64Array, uniform

NOT_FINITE = "the model's logits for the next token are not finite numbers"
NO_TOKEN = "the sampling parameters leave no token to choose"
# A row is cut into this many parts when a floor for its k-th value is looked for.
_NUM_PARTS = 512


class PendingSample(Protocol):
    """Tokens that the device may still be choosing."""

    @property
    def token_ids(self) -> Sequence[int] | Tensor:
        """One for each row: int64 [R] on the device where they are still being chosen, negative where a row failed."""
        ...

    def resolve(self) -> "Sampled":
        """The results, once they are there."""
        ...


@dataclass(frozen=True, slots=True)
class Sampled:
    """Results by row of the logits. `token_ids[i]` is meaningless where `failed` names i."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def resolve(self) -> "Sampled":
        """Itself: nothing is on its way any more."""
        return self

    def accept(self, first: int, drafts: Sequence[int]) -> range:
        """Which tokens of a row with `drafts` count, whose first is `first`: those that come after right drafts only.

        Empty where that one failed. A later failure is no failure yet: the next step begins there.
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
    """Torch without helper threads: its parallel loops wait for all of them, and on a busy machine one that the system
    has put aside costs more than the whole of sampling. Those that wait for more work take a core from the kernels."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def sample(logits: Tensor, slots: Sequence[Slot], eos_token_ids: Sequence[int]) -> Sampled:
    """Choose one token for each row.

    logits: [R, vocab] float32 or float64, changed in place; slots: R, of which row i continues slots[i].
    A row whose logits are not numbers, or that has no token left to choose, is reported in `failed`.
    """
    failed: dict[int, str] = {}
    masked: dict[int, Tensor | None] = {}
    wanted = [i for i, slot in enumerate(slots) if slot.params.logprobs is not None]
    raw = _take(logits, wanted).log_softmax(-1) if wanted else None
    for i, slot in enumerate(slots):
        try:
            masked[i] = _edit(logits[i], slot, eos_token_ids)
        except (RuntimeError, IndexError, ValueError) as error:
            failed[i] = f"sampling failed: {error}"
    best, token_ids = _most_likely(logits)
    for i in (~best.isfinite()).nonzero()[:, 0].tolist():
        # The mask alone can empty a row: the model left a token if it took one away.
        taken = masked.get(i)
        emptied = taken is not None and bool(best[i] == -torch.inf) and bool(taken.isfinite().any())
        failed.setdefault(i, NO_TOKEN if emptied else NOT_FINITE)
    drawn = [i for i, slot in enumerate(slots) if not slot.params.greedy and i not in failed]
    if drawn:
        for i, token_id in zip(drawn, _draw(logits, drawn, slots), strict=True):
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
    """Each row's token with its log-probability and the `num_top[i]` most likely alternatives, best first.

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


def edited(slot: Slot) -> bool:
    """Whether the slot's next logits are changed before a token is chosen."""
    params = slot.params
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or slot.num_output_tokens < params.min_tokens
    )


def repeated(slot: Slot) -> tuple[Int64Array, Float64Array]:
    """Ids, some more than once, whose logits the repetition penalty changes, and the penalty of each."""
    penalty = slot.params.repetition_penalty
    ids = slot.token_ids[: slot.num_tokens if penalty != 1.0 else 0]
    return ids, np.full(len(ids), penalty)


def costs(slot: Slot) -> tuple[Int64Array, Float64Array]:
    """Distinct ids, and what presence and frequency penalties add to their logits."""
    params = slot.params
    if not params.presence_penalty and not params.frequency_penalty:
        return np.empty(0, dtype=np.int64), np.empty(0)
    ids, counts = np.unique(slot.token_ids[slot.num_prompt_tokens : slot.num_tokens], return_counts=True)
    return ids, -params.presence_penalty - params.frequency_penalty * counts.astype(np.float64)


def biases(slot: Slot) -> tuple[Int64Array, Float64Array]:
    """Distinct ids, and what the bias adds to their logits."""
    bias: dict[int, float] = {}
    for token_id, value in slot.params.logit_bias:
        bias[token_id] = bias.get(token_id, 0.0) + value
    return np.array(list(bias), dtype=np.int64), np.array(list(bias.values()))


def barred(slot: Slot, eos_token_ids: Sequence[int]) -> tuple[Int64Array, Float64Array]:
    """Ids that may not come before `min_tokens`, and -inf for each."""
    params = slot.params
    if slot.num_output_tokens >= params.min_tokens:
        return np.empty(0, dtype=np.int64), np.empty(0)
    ids = np.array([*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)], dtype=np.int64)
    return ids, np.full(len(ids), -np.inf)


def _edit(row: Tensor, slot: Slot, eos_token_ids: Sequence[int]) -> Tensor | None:
    """Penalties, bias and the `min_tokens` mask, in place on one row of logits; returns what the mask took away."""
    if not edited(slot):
        return None
    ids, penalty = repeated(slot)
    if ids.size:
        # Ids that occur twice are written twice, with the same value.
        seen = torch.from_numpy(ids).to(row.device)
        old = row[seen]
        row[seen] = torch.where(old > 0, old / penalty[0], old * penalty[0])
    for ids, numbers in (costs(slot), biases(slot)):
        if ids.size:
            row[torch.from_numpy(ids).to(row.device)] += torch.from_numpy(numbers).to(row.device, row.dtype)
    if slot.num_output_tokens >= slot.params.min_tokens:
        return None
    index = torch.from_numpy(barred(slot, eos_token_ids)[0]).to(row.device)
    masked = row[index]
    row[index] = -torch.inf
    return masked


def _most_likely(logits: Tensor) -> tuple[Tensor, list[int]]:
    """Each row's largest logit [R] and the first id that has it; nan counts as the largest."""
    if logits.device.type == "cpu":
        values = logits.numpy()  # whose argmax is several times as fast as torch's, and takes the first by contract
        first = values.argmax(1)
        return torch.from_numpy(values[np.arange(len(values)), first]), first.tolist()
    parts = _in_parts(logits)
    best, part = parts.amax(-1).max(-1)
    inside = parts.gather(1, part[:, None, None].expand(-1, 1, parts.shape[2]))[:, 0].argmax(-1)
    ids: list[int] = (part * parts.shape[2] + inside).tolist()
    return best, ids


def _draw(logits: Tensor, rows: list[int], slots: Sequence[Slot]) -> list[int]:
    """A token for each of `rows` by its own noise."""
    params = [slots[i].params for i in rows]
    scaled = _take(logits, rows)
    if any(p.temperature != 1.0 for p in params):
        temperature = [max(p.temperature, MIN_TEMPERATURE) for p in params]
        scaled = scaled / torch.tensor(temperature, dtype=logits.dtype, device=logits.device)[:, None]
    parts = _in_parts(scaled)
    probs = parts.flatten(1).softmax(-1).view_as(parts)
    noise = uniform([p.seed or 0 for p in params], [slots[i].choice for i in rows], [slots[i].num_tokens for i in rows])
    drawn = [0] * len(rows)
    whole = [j for j, p in enumerate(params) if not _truncates(p)]
    if whole:
        for j, token_id in zip(whole, _invert(_take(probs, whole), noise[whole]), strict=True):
            drawn[j] = token_id
    cut = [j for j, p in enumerate(params) if _truncates(p)]
    if cut:
        parts = _take(probs, cut)
        maxima = parts.amax(-1)
        floor = _survivor_floor(maxima, [params[j] for j in cut], logits.shape[1])
        for j, (ids, weights) in zip(cut, _at_least(parts, maxima, floor), strict=True):
            keep = _truncate(weights, params[j])
            drawn[j] = int(ids[keep][_first_above(np.cumsum(weights[keep]), float(noise[j]))])
    return drawn


def _truncates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _take(values: Tensor, rows: list[int]) -> Tensor:
    """`values[rows]` for ascending rows, without a copy when that is all of them."""
    return values if len(rows) == len(values) else values[rows]


def _in_parts(values: Tensor) -> Tensor:
    """[R, vocab] as [R, parts, width], filled up with -inf where the width does not divide the vocabulary.

    Whole rows are expensive to search, to sort or to sum up; by sums and maxima of parts, few need a closer look.
    """
    rows, vocab = values.shape
    parts = min(_NUM_PARTS, vocab)
    width = -(-vocab // parts)
    if parts * width > vocab:
        values = torch.nn.functional.pad(values, (0, parts * width - vocab), value=-torch.inf)
    return values.view(rows, parts, width)


def _invert(probs: Tensor, noise: Float64Array) -> list[int]:
    """Inverse CDF over whole rows: first the part, then the token in it. probs: [R, parts, width]; noise: R."""
    width = probs.shape[2]
    cdf = probs.sum(-1).cumsum(-1, dtype=torch.float64)
    target = torch.from_numpy(noise).to(probs.device)[:, None] * cdf[:, -1:]
    part = _first_above_each(cdf, target)
    before = torch.where(part > 0, cdf.gather(1, (part - 1).clamp_min(0)), 0.0)
    inside = probs.gather(1, part[:, :, None].expand(-1, 1, width))[:, 0].double().cumsum(-1)
    chosen: list[int] = (part * width + _first_above_each(inside, target - before))[:, 0].tolist()
    return chosen


def _first_above_each(cdf: Tensor, target: Tensor) -> Tensor:
    """Per row the first index at which `cdf` exceeds `target`; both [R, ...]. Rounding may lift the target to the sum
    itself: the last index with any weight is then the answer."""
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(cdf, target, right=True), last)


def _first_above(cdf: Float64Array, noise: float) -> int:
    """The same on the host, for one row; `noise` is relative to the sum."""
    index = int(np.searchsorted(cdf, noise * cdf[-1], side="right"))
    return min(index, int(np.searchsorted(cdf, cdf[-1])))


def _survivor_floor(maxima: Tensor, params: Sequence[SamplingParams], vocab: int) -> Tensor:
    """Per row a probability below which nothing survives truncation, so that few tokens need a closer look. [R]."""
    floor = _kth_floor(maxima, [p.top_k if p.top_k > 0 else vocab + 1 for p in params])
    # Tokens below (1 - top_p) / vocab together weigh less than what top-p cuts off. After top-k, neither this nor min-p
    # may thin out what top-p looks at: it needs the sum of all that top-k left. Halves leave room for rounding.
    top_p = [(1.0 - p.top_p) / (2.0 * vocab) if p.top_k <= 0 else 0.0 for p in params]
    min_p = [p.min_p / 2.0 if p.top_k <= 0 or p.top_p == 1.0 else 0.0 for p in params]
    host = torch.tensor([top_p, min_p], dtype=floor.dtype).to(floor.device)
    return torch.maximum(floor, torch.maximum(host[0], host[1] * maxima.amax(-1)))


def _truncate(weights: Float64Array, params: SamplingParams) -> npt.NDArray[np.bool_]:
    """Which of a row's surviving tokens are left after top-k, top-p and min-p. weights: probabilities, token order."""
    threshold = params.min_p * weights.max()
    mass = 1.0
    if params.top_k > 0:
        if params.top_k < len(weights):
            kth = np.partition(weights, -params.top_k)[-params.top_k]
            threshold = max(threshold, kth)
            weights = np.where(weights >= kth, weights, 0.0)
        mass = weights.sum()
    if params.top_p < 1.0:
        ordered = np.sort(weights)[::-1]
        reached = int(np.searchsorted(np.cumsum(ordered), params.top_p * mass))
        threshold = max(threshold, ordered[min(reached, len(ordered) - 1)])
    keep: npt.NDArray[np.bool_] = weights >= threshold
    return keep


def _kth_floor(maxima: Tensor, ks: Sequence[int]) -> Tensor:
    """A lower bound of each row's k-th largest value: the k-th largest maximum of its parts; -inf beyond those. [R].

    maxima: [R, parts].
    """
    ordered = maxima.sort(-1, descending=True).values
    ordered = torch.nn.functional.pad(ordered, (0, 1), value=-torch.inf)
    index = torch.tensor([min(k - 1, maxima.shape[1]) for k in ks], device=maxima.device)
    return ordered.gather(1, index[:, None])[:, 0]


def _at_least(parts: Tensor, maxima: Tensor, floor: Tensor) -> list[tuple[Int64Array, Float64Array]]:
    """For each row, ids (ascending) and values of the tokens at or above the row's floor, on the host."""
    row, part = (maxima >= floor[:, None]).nonzero(as_tuple=True)
    look = parts[row, part]
    hit, offset = (look >= floor[row, None]).nonzero(as_tuple=True)
    values = look[hit, offset].double().cpu().numpy()
    ids = (part[hit] * parts.shape[2] + offset).cpu().numpy()
    ends = np.cumsum(np.bincount(row[hit].cpu().numpy(), minlength=len(parts)))[:-1]
    return list(zip(np.split(ids, ends), np.split(values, ends), strict=True))
