"""Samples the tokens of a step: on the host, or with kernels on the device without waiting."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from serve_app.model.executor import ModelExecutor
from serve_app.model.facts import ModelFacts
from serve_app.model.sampling.columns import Column
from serve_app.model.sampling.rows import SamplingRows
from serve_app.model.sampling.sampler import PendingSample, Sampled, sample

logger = logging.getLogger(__name__)


class TokenSampler(Protocol):
    """Chooses one token per row."""

    def __call__(self, hidden: Tensor, rows: SamplingRows, history: Tensor | None) -> PendingSample:
        """Sample. hidden: [R, hidden]. history: int32 [slots, positions] on the device, with the
        tokens of slots that have penalties; None if the host samples.
        """
        ...


class HostSampler:
    """Samples from logits on the host. If all rows are plain and greedy, the executor finds the
    largest logits.
    """

    def __init__(self, executor: ModelExecutor, eos_token_ids: Sequence[int]) -> None:
        self._executor, self._eos_token_ids = executor, eos_token_ids

    def __call__(self, hidden: Tensor, rows: SamplingRows, history: Tensor | None) -> PendingSample:
        """See `TokenSampler`."""
        likeliest = self._executor.likeliest
        if likeliest is not None and rows.is_plain and not rows.parameters[:, Column.TEMPERATURE].any():
            token_ids: list[int] = likeliest(hidden).tolist()
            if min(token_ids) >= 0:
                return Sampled(token_ids)
        logits = wide_logits(self._executor, hidden)
        return sample(logits, rows.states(), rows.parameters, self._eos_token_ids, rows.masks)


class DeviceSampler:
    """Samples with kernels on the device. choose: `ModelExecutor.choose`, used for plain rows."""

    def __init__(
        self, executor: ModelExecutor, eos_token_ids: Sequence[int], choose: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        self._executor, self._eos_token_ids, self._choose = executor, eos_token_ids, choose

    def __call__(self, hidden: Tensor, rows: SamplingRows, history: Tensor | None) -> PendingSample:
        """See `TokenSampler`."""
        from serve_app.model.gpu import sampling

        if rows.is_plain:
            return sampling.sample_plain(hidden, rows.parameters, self._choose)
        assert history is not None
        return sampling.sample(wide_logits(self._executor, hidden), rows, history, self._eos_token_ids)

    def warm_up(self, hidden: Tensor) -> None:
        """Compile the kernels for plain rows, whose logits stay in the head's dtype. hidden: [1,
        hidden].
        """
        self._choose(hidden, torch.zeros(1, len(Column), dtype=torch.float64, device=hidden.device))


@dataclass(frozen=True, slots=True)
class Mended:
    """Samples of a step with some plain rows. plain: results for all rows, as if they were plain.
    sampled: results for the rows in `others`, which replace theirs.
    """

    plain: PendingSample
    others: Sequence[int]
    sampled: PendingSample

    def resolve(self) -> Sampled:
        """Wait for the results."""
        plain, sampled = self.plain.resolve(), self.sampled.resolve()
        token_ids = list(plain.token_ids)
        for i, token_id in zip(self.others, sampled.token_ids, strict=True):
            token_ids[i] = token_id
        failed = {i: error for i, error in plain.failed.items() if i not in self.others}
        failed |= {self.others[j]: error for j, error in sampled.failed.items()}
        return Sampled(token_ids, {self.others[j]: entry for j, entry in sampled.logprobs.items()}, failed)


def wide_logits(executor: ModelExecutor, hidden: Tensor) -> Tensor:
    """Return the logits [R, vocab_size] of hidden states [R, hidden]; float32, or float64 for a
    float64 model.
    """
    logits = executor.compute_logits(hidden)
    return logits if logits.dtype == torch.float64 else logits.float()


def pick_sampler(executor: ModelExecutor, facts: ModelFacts) -> TokenSampler:
    """Return the device sampler if the executor supports it and its kernels choose correct tokens,
    else the host sampler.
    """
    on_host = HostSampler(executor, facts.eos_token_ids)
    if executor.choose is None:
        return on_host
    try:
        from serve_app.model.gpu import sampling

        problem = "" if sampling.agrees(facts.vocab_size, facts.device) else "they choose different tokens"
    except Exception as error:  # a kernel may raise anything on untested hardware
        problem = str(error)
    if problem:
        logger.warning("model %s: runs without the sampling kernels: %s", facts.name, problem)
        return on_host
    return DeviceSampler(executor, facts.eos_token_ids, executor.choose)
