"""Continuous batching without packing: padded batches that are merged and filtered.

An intermediate step between padded static and packed batches. Free slots are filled at once, but
every row of the batch is as wide as the longest. New requests are computed in a separate batch
while the running requests pause. Then the batches are merged: both caches are padded to the wider
one and copied into a new one. Rows of finished requests are removed, and columns that contain only
padding are trimmed. Modules and cache are transformers' own.

Counts the positions that each step computed, held and copied. Does not decide which figures are
shown.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from serve_app.core.request import EngineRequest
from serve_app.core.results import FinishReason, TokenDelta
from serve_app.core.step_plan import ScheduledRequest
from serve_app.core.step_record import SchedulerStats, StepRecord
from serve_app.experiments.padded import left_padded
from serve_app.experiments.padding import PaddedStep


@dataclass(slots=True)
class _Sequence:
    request: EngineRequest
    max_tokens: int
    slot: int
    num_output: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + self.num_output

    @property
    def is_finished(self) -> bool:
        return self.num_output >= self.max_tokens


@dataclass(slots=True)
class _Batch:
    """Rows in order. mask: int64 [rows, columns], 1 for tokens; newest: the last token of each row,
    int64 [rows, 1].

    The cache's tensors have shape [rows, heads, columns, head_dim].
    """

    sequences: list[_Sequence]
    mask: Tensor
    newest: Tensor
    cache: DynamicCache = field(default_factory=DynamicCache)

    @property
    def cache_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)


class PaddedContinuousEngine:
    """Has the interface of the real engine. Greedy; each request runs to its `max_tokens`.

    model: a causal LM of transformers. on_step and on_padding are called after every step.
    """

    def __init__(
        self,
        model: Any,
        max_num_seqs: int,
        on_step: Callable[[StepRecord], None],
        on_padding: Callable[[PaddedStep], None],
    ) -> None:
        self._model = model
        self._on_step, self._on_padding = on_step, on_padding
        self._waiting: deque[tuple[EngineRequest, int]] = deque()
        self._free_slots = list(range(max_num_seqs))
        self._batch: _Batch | None = None
        self._num_steps = 0
        self._moved_bytes = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._batch)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `ValueError` if it has no `max_tokens`."""
        if request.params.max_tokens is None:
            raise ValueError(f"{request.request_id} has no max_tokens")
        self._waiting.append((request, request.params.max_tokens))

    @torch.inference_mode()
    def step(self) -> list[TokenDelta]:
        """Run one forward pass: over the waiting prompts if slots are free, else over each running
        request's last token.

        At least one request must be unfinished.
        """
        started_at = time.perf_counter()
        is_prefill = bool(self._waiting and self._free_slots)
        if is_prefill:
            batch, columns = self._admit()
        else:
            assert self._batch is not None
            batch, columns = self._batch, 1
            batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(batch.sequences), 1)], dim=1)
        appended_bytes = batch.cache_bytes
        tokens = self._forward(batch, columns)
        model_s = time.perf_counter() - started_at
        rows = [_row(sequence, is_prefill) for sequence in batch.sequences]
        deltas = [_append(sequence, token) for sequence, token in zip(batch.sequences, tokens, strict=True)]
        if is_prefill and self._batch is not None:
            batch = self._merge(self._batch, batch)
        wanted, computed = sum(row.num_tokens for row in rows), len(rows) * columns
        held, used = batch.mask.numel(), int(batch.mask.sum())
        self._batch = self._filter(batch)
        self._on_padding(PaddedStep(computed, wanted, held, used, appended_bytes, self._moved_bytes))
        self._moved_bytes = 0
        self._on_step(self._record(rows, deltas, is_prefill, started_at, model_s))
        self._num_steps += 1
        return deltas

    def _admit(self) -> tuple[_Batch, int]:
        """Return a batch of waiting requests, one per free slot, and its columns: the prompts,
        padded on the left.
        """
        sequences = []
        while self._waiting and self._free_slots:
            sequences.append(_Sequence(*self._waiting.popleft(), self._free_slots.pop(0)))
        columns = max(sequence.num_tokens for sequence in sequences)
        ids, mask = left_padded([sequence.request.prompt_token_ids for sequence in sequences])
        return _Batch(sequences, mask.to(self._model.device), ids.to(self._model.device)), columns

    def _forward(self, batch: _Batch, columns: int) -> list[int]:
        positions = (batch.mask.cumsum(dim=1) - 1).clamp(min=0)[:, -columns:]
        logits = self._model(
            input_ids=batch.newest,
            attention_mask=batch.mask,
            position_ids=positions,
            past_key_values=batch.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        batch.newest = logits[:, -1].argmax(dim=-1, keepdim=True)
        tokens: list[int] = batch.newest[:, 0].tolist()
        return tokens

    def _merge(self, first: _Batch, second: _Batch) -> _Batch:
        """Merge two batches into one, as wide as the wider one."""
        columns = max(first.mask.shape[1], second.mask.shape[1])

        def join(a: Tensor, b: Tensor, dim: int) -> Tensor:
            shape = list(a.shape)
            shape[0], shape[dim] = a.shape[0] + b.shape[0], columns
            joined = a.new_zeros(shape)
            joined[: a.shape[0]].narrow(dim, columns - a.shape[dim], a.shape[dim]).copy_(a)
            joined[a.shape[0] :].narrow(dim, columns - b.shape[dim], b.shape[dim]).copy_(b)
            return joined

        for ours, theirs in zip(first.cache.layers, second.cache.layers, strict=True):
            ours.keys, ours.values = join(ours.keys, theirs.keys, 2), join(ours.values, theirs.values, 2)
        mask, newest = join(first.mask, second.mask, 1), torch.cat([first.newest, second.newest])
        merged = _Batch(first.sequences + second.sequences, mask, newest, first.cache)
        self._moved_bytes += merged.cache_bytes
        return merged

    def _filter(self, batch: _Batch) -> _Batch | None:
        """Remove finished rows, then columns that contain only padding."""
        kept = [row for row, sequence in enumerate(batch.sequences) if not sequence.is_finished]
        if len(kept) == len(batch.sequences):
            return batch
        self._free_slots += [sequence.slot for sequence in batch.sequences if sequence.is_finished]
        self._free_slots.sort()
        if not kept:
            return None
        rows = torch.tensor(kept, device=batch.mask.device)
        mask = batch.mask[rows]
        first = int(mask.any(dim=0).int().argmax())
        for layer in batch.cache.layers:
            layer.keys, layer.values = layer.keys[:, :, first:][rows], layer.values[:, :, first:][rows]
        filtered = _Batch([batch.sequences[row] for row in kept], mask[:, first:], batch.newest[rows], batch.cache)
        self._moved_bytes += filtered.cache_bytes
        return filtered

    def _record(
        self,
        rows: Sequence[ScheduledRequest],
        deltas: Sequence[TokenDelta],
        is_prefill: bool,
        started_at: float,
        model_s: float,
    ) -> StepRecord:
        num_tokens = sum(row.num_tokens for row in rows)
        names = tuple((row.request_id, 0) for row in rows)
        running = len(self._batch.sequences) if self._batch else 0
        held = self._batch.mask.numel() if self._batch else 0
        return StepRecord(
            step=self._num_steps,
            started_at=started_at,
            schedule_s=0.0,
            model_s=model_s,
            update_s=time.perf_counter() - started_at - model_s,
            rows=tuple(rows),
            num_prefill_tokens=num_tokens if is_prefill else 0,
            num_decode_tokens=0 if is_prefill else num_tokens,
            num_output_tokens=len(deltas),
            prefix_hit_tokens=0,
            prefix_queried_tokens=0,
            preempted=(),
            admitted=names if is_prefill else (),
            finished=tuple((d.request_id, 0, d.finish_reason) for d in deltas if d.finish_reason is not None),
            gate_open=True,
            stats=SchedulerStats(len(self._waiting), running, held, held, 0),
        )


def _row(sequence: _Sequence, is_prefill: bool) -> ScheduledRequest:
    start = 0 if is_prefill else sequence.num_tokens - 1
    num_tokens = sequence.num_tokens - start
    return ScheduledRequest(sequence.slot, sequence.request.request_id, 0, start, num_tokens, (), True, is_prefill)


def _append(sequence: _Sequence, token: int) -> TokenDelta:
    sequence.num_output += 1
    reason = FinishReason.LENGTH if sequence.is_finished else None
    return TokenDelta(sequence.request.request_id, 0, sequence.num_output - 1, (token,), reason)
