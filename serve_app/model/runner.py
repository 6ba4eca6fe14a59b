"""Runs one step's plan on the model: apply it, one packed forward pass, logits for sampled rows only, sample.

Decides: how host arrays reach the device, in which slices prompt log-probabilities are computed, and whose fault a
failing step is. Does not decide what runs (the scheduler) or how attention works (the backend).
Order of side effects in a step: slots and block tables, block copies, keys and values of the row, sampled tokens.

A step may be executed before the one before it is resolved: the ids that this one samples are on the device, where the
next one's rows find them by their slot.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from serve_app.core.output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput, TokenLogprob
from serve_app.model.attention.base import AttentionBatch
from serve_app.model.input_batch import InputBatch, PackedRow, Slot
from serve_app.model.paged_model import PagedModel
from serve_app.model.sampler import PendingSample, Sampled, rank
from serve_app.model.transfer import to_device

logger = logging.getLogger(__name__)

# Prompt log-probabilities materialise at most about this many logits at once.
_LOGITS_PER_SLICE = 2**23


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A forward pass on its way: the packed row and its hidden states [T, hidden]."""

    packed: PackedRow
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class Pending:
    """A step on its way."""

    resolve: Callable[[], ModelRunnerOutput]
    """Waits for the step. Steps are resolved in the order in which they were executed, each once."""


class ModelRunner:
    """One rank's model with its slots.

    `execute` runs a step; an exception in it ends only the requests that cause it. It raises only when the model
    cannot even run a harmless token any more.
    """

    def __init__(self, model: PagedModel, max_num_seqs: int) -> None:
        self.model = model
        self._batch = InputBatch(max_num_seqs, model.max_model_len, model.block_size)
        self._scratch_block = 0
        self._sampled_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=model.device)  # the last, by slot

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """A pool for a scheduler of `num_blocks` blocks, and one block more that only `probe` writes."""
        self.model.allocate_kv_cache(num_blocks + 1)
        self._scratch_block = num_blocks

    def execute(self, output: SchedulerOutput) -> Pending:
        """Launch one step. One may be unresolved before it, unless that has drafts or a row here has penalties, which
        count tokens on the host."""
        self._batch.apply(output)
        if output.block_copies:
            self.model.copy_blocks(output.block_copies)
        try:
            return self.sample(self.forward(output.rows))
        except Exception as error:
            result = self._run_one_by_one(output.rows, error)
            return Pending(lambda: result)

    @torch.inference_mode()
    def forward(self, rows: Sequence[ScheduledRequest]) -> Forwarded:
        """Launch the forward pass of `rows`, whose slots and blocks are in place. Writes their keys and values."""
        packed = self._batch.pack(rows)
        device_rows = to_device(packed.host, self.model.device)
        batch = AttentionBatch(
            query_starts=packed.query_starts,
            kv_lens=packed.kv_lens,
            block_tables=packed.block_tables,
            slot_mapping=device_rows[2],
        )
        input_ids = device_rows[0]
        if packed.has_unknown_ids:
            known = self._sampled_ids[(-1 - input_ids).clamp_min(0)]
            input_ids = torch.where(input_ids < 0, known, input_ids)
        return Forwarded(packed, self.model.forward(input_ids, device_rows[1], batch))

    @torch.inference_mode()
    def sample(self, forwarded: Forwarded) -> Pending:
        """Launch the rest of a step: tokens for each row that samples, and the log-probabilities asked for."""
        packed = forwarded.packed
        sampled, seats = self._sample_rows(forwarded)
        prompt_logprobs = {
            i: entries
            for i, slot in enumerate(packed.slots)
            if slot.params.prompt_logprobs is not None and (entries := self._prompt_logprobs(forwarded, i))
        }
        if len(seats):
            self._sampled_ids[seats] = torch.as_tensor(sampled.token_ids, device=seats.device).clamp_min(0)
        # Last, so that a row that has to be run again after an exception finds its history unchanged.
        for row, slot in zip(packed.rows, packed.slots, strict=True):
            slot.num_tokens += row.samples
        return Pending(partial(self._resolve, packed, sampled, prompt_logprobs))

    def _sample_rows(self, forwarded: Forwarded) -> tuple[PendingSample, Tensor]:
        """New tokens of the rows that sample, behind one another, and the slot of each.

        A token is sampled after a row's last known token and after each of its drafts, as if the drafts before it were
        right. Up to the first that differs from its draft, these are what steps without drafts would have sampled.
        """
        packed = forwarded.packed
        positions: list[int] = []
        seats: list[int] = []
        slots: list[Slot] = []
        for row, slot, end in zip(packed.rows, packed.slots, packed.query_starts[1:], strict=True):
            if row.samples:
                ahead = range(len(row.draft_token_ids) + 1)
                positions += range(end - len(ahead), end)
                seats += [row.slot] * len(ahead)
                slots += map(slot.ahead, ahead)
        index = to_device(np.array([positions, seats], dtype=np.int64), forwarded.hidden.device)
        if not positions:
            return Sampled([]), index[1]
        return self.model.sample(forwarded.hidden[index[0]], slots), index[1]

    def _resolve(
        self, packed: PackedRow, pending: PendingSample, prompt_logprobs: dict[int, tuple[TokenLogprob, ...]]
    ) -> ModelRunnerOutput:
        """Wait for the tokens, write them down, and give each row its own."""
        sampled = pending.resolve()
        token_ids: list[tuple[int, ...]] = []
        logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        failed: dict[int, str] = {}
        first = 0
        for i, row in enumerate(packed.rows):
            kept = sampled.accept(first, row.draft_token_ids) if row.samples else range(0)
            token_ids.append(tuple(sampled.token_ids[j] for j in kept))
            if kept and first in sampled.logprobs:
                logprobs[i] = tuple(sampled.logprobs[j] for j in kept)
            if row.samples:
                if not kept:
                    failed[i] = sampled.failed[first]
                first += len(row.draft_token_ids) + 1
                self._batch.remember(row, packed.slots[i], token_ids[i])
        return ModelRunnerOutput(tuple(token_ids), logprobs, prompt_logprobs, failed)

    def _prompt_logprobs(self, forwarded: Forwarded, index: int) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of the prompt tokens that row `index`'s positions predict."""
        packed = forwarded.packed
        row, slot = packed.rows[index], packed.slots[index]
        end = min(row.start + row.num_tokens, slot.num_prompt_tokens - 1)
        offset = packed.query_starts[index] - row.start
        step = max(1, _LOGITS_PER_SLICE // self.model.vocab_size)
        entries: list[TokenLogprob] = []
        for begin in range(row.start, end, step):
            stop = min(begin + step, end)
            logits = self.model.compute_logits(forwarded.hidden[offset + begin : offset + stop])
            following: list[int] = slot.token_ids[begin + 1 : stop + 1].tolist()
            num_top = slot.params.prompt_logprobs or 0
            entries += rank(logits.log_softmax(-1), following, [num_top] * len(following))
        return tuple(entries)

    def _run_one_by_one(self, rows: Sequence[ScheduledRequest], error: Exception) -> ModelRunnerOutput:
        """Find whose row broke the step. Running a row twice is harmless: it writes the same keys and values."""
        token_ids: list[tuple[int, ...]] = [()] * len(rows)
        logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        failed: dict[int, str] = {}
        for i, row in enumerate(rows):
            try:
                result = self.sample(self.forward([row])).resolve()
            except Exception:
                # The client reads `failed`, the operator the log: an exception's text may hold paths.
                logger.exception("the model failed on request %r", row.request_id)
                failed[i] = "the model failed on this request"
                continue
            token_ids[i] = result.token_ids[0]
            for target, source in (
                (logprobs, result.logprobs),
                (prompt_logprobs, result.prompt_logprobs),
            ):
                if 0 in source:
                    target[i] = source[0]
            if 0 in result.failed:
                failed[i] = result.failed[0]
        if len(failed) == len(rows):
            self._check_alive(error)
        return ModelRunnerOutput(tuple(token_ids), logprobs, prompt_logprobs, failed)

    def _check_alive(self, error: Exception) -> None:
        """Raise the step's `error` when the model cannot run a single harmless token either."""
        try:
            self.probe(1, 1)
        except Exception:
            raise error from None

    @torch.inference_mode()
    def probe(self, num_tokens: int, num_rows: int) -> None:
        """Run `num_tokens` zeros, split over `num_rows` rows, without a trace: their keys go to the scratch block.

        Takes the time and the working memory of such a step.
        """
        num_rows = min(num_rows, num_tokens)
        block_size, device = self.model.block_size, self.model.device
        counts = [num_tokens // num_rows + (i < num_tokens % num_rows) for i in range(num_rows)]
        positions = torch.cat([torch.arange(count) for count in counts])
        batch = AttentionBatch(
            query_starts=[0, *itertools.accumulate(counts)],
            kv_lens=counts,
            block_tables=[[self._scratch_block] * -(-count // block_size) for count in counts],
            slot_mapping=(positions % block_size + self._scratch_block * block_size).to(device),
        )
        hidden = self.model.forward(torch.zeros_like(positions, device=device), positions.to(device), batch)
        last = torch.tensor(batch.query_starts[1:], device=device) - 1
        self.model.compute_logits(hidden[last]).amax().item()


def set_num_threads(num_threads: int) -> None:
    """CPU threads that the model's operations use when called from the current thread."""
    torch.set_num_threads(num_threads)
