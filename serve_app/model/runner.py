"""Runs one step's plan on the model: apply it, one packed forward pass, logits for sampled rows only, sample.

Decides: how host arrays reach the device, in which slices prompt log-probabilities are computed, and whose fault a
failing step is. Does not decide what runs (the scheduler) or how attention works (the backend).
Order of side effects in a step: slots and block tables, block copies, keys and values of the row, sampled tokens.

A step may be executed before the one before it is resolved: the ids that this one samples are on the device, where the
next one's rows and penalties find them by slot and position.
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
from serve_app.model.attention.base import AttentionBatch, block_matrix
from serve_app.model.input_batch import InputBatch, PackedRow
from serve_app.model.paged_model import PagedModel
from serve_app.model.sampler import PendingSample, Sampled, one_thread, rank
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
        # By slot and position: the ids that steps sample, which the host does not know yet, and of slots with penalties
        # all others too. On a CPU, numpy's zeroed pages cost memory only as far as they are written.
        history = np.zeros((max_num_seqs, model.max_model_len + 1), dtype=np.int32)
        self._history = torch.from_numpy(history).to(model.device)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """A pool for a scheduler of `num_blocks` blocks, and one block more that only `probe` writes."""
        self.model.allocate_kv_cache(num_blocks + 1)
        self._scratch_block = num_blocks

    def execute(self, output: SchedulerOutput) -> Pending:
        """Launch one step. One may be unresolved before it, unless that has drafts."""
        self._batch.apply(output)
        for start in output.slot_starts:
            if start.params.has_penalties:
                ids = np.array(start.token_ids, dtype=np.int32)
                self._history[start.slot, : len(ids)] = to_device(ids, self.model.device)
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
        input_ids, positions, slot_mapping, seats = to_device(packed.host, self.model.device)
        batch = AttentionBatch(
            query_starts=packed.query_starts,
            kv_lens=packed.kv_lens,
            block_tables=packed.block_tables,
            slot_mapping=slot_mapping,
        )
        if packed.has_unknown_ids:
            input_ids = torch.where(input_ids < 0, self._history[seats, positions].long(), input_ids)
        if packed.has_drafts:
            # What follows a draft is sampled as if it had been.
            self._history[seats, positions] = input_ids.int()
        return Forwarded(packed, self.model.forward(input_ids, positions, batch))

    @torch.inference_mode()
    def sample(self, forwarded: Forwarded) -> Pending:
        """Launch the rest of a step: tokens for each row that samples, and the log-probabilities asked for."""
        packed = forwarded.packed
        sampled = self._sample_rows(forwarded)
        prompt_logprobs = {
            i: entries
            for i, slot in enumerate(packed.slots)
            if slot.params.prompt_logprobs is not None and (entries := self._prompt_logprobs(forwarded, i))
        }
        # Last, so that a row that has to be run again after an exception finds its history unchanged.
        for row, slot in zip(packed.rows, packed.slots, strict=True):
            slot.num_tokens += row.samples
        if isinstance(sampled, Sampled):
            # The next step's penalties, if they are the host's to compute, count these.
            result = self._resolve(packed, sampled, prompt_logprobs)
            return Pending(lambda: result)
        return Pending(partial(self._resolve, packed, sampled, prompt_logprobs))

    def _sample_rows(self, forwarded: Forwarded) -> PendingSample:
        """A token for each of the step's sampling rows. Up to the first that differs from its draft, a row's tokens are
        what steps without drafts would have sampled."""
        rows, hidden = forwarded.packed.sampling, forwarded.hidden
        if not len(rows.tokens):
            return Sampled([])
        tokens, seats, num_tokens = to_device(np.stack([rows.tokens, rows.seats, rows.num_tokens]), hidden.device)
        if len(tokens) < len(hidden):
            with one_thread():
                hidden = hidden[tokens]
        sampled = self.model.sample(hidden, rows, self._history)
        token_ids = torch.as_tensor(sampled.token_ids, device=hidden.device)
        self._history[seats, num_tokens] = token_ids.clamp_min(0).int()
        return sampled

    def _resolve(
        self, packed: PackedRow, pending: PendingSample, prompt_logprobs: dict[int, tuple[TokenLogprob, ...]]
    ) -> ModelRunnerOutput:
        """Wait for the tokens, write them down, and give each row its own."""
        sampled = pending.resolve()
        self._batch.remember(packed.sampling, sampled.token_ids)
        token_ids: list[tuple[int, ...]] = [()] * len(packed.rows)
        logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        failed: dict[int, str] = {}
        first = 0
        for i, row in enumerate(packed.rows):
            if not row.samples:
                continue
            drafts = row.draft_token_ids
            if not drafts and not sampled.failed:
                token_ids[i] = (sampled.token_ids[first],)
            elif kept := sampled.accept(first, drafts):
                token_ids[i] = tuple(sampled.token_ids[j] for j in kept)
                packed.slots[i].num_tokens += len(kept) - 1
            else:
                failed[i] = sampled.failed[first]
            if token_ids[i] and first in sampled.logprobs:
                logprobs[i] = tuple(sampled.logprobs[first + j] for j in range(len(token_ids[i])))
            first += len(drafts) + 1
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
            block_tables=block_matrix([[self._scratch_block] * -(-count // block_size) for count in counts]),
            slot_mapping=(positions % block_size + self._scratch_block * block_size).to(device),
        )
        hidden = self.model.forward(torch.zeros_like(positions, device=device), positions.to(device), batch)
        last = torch.tensor(batch.query_starts[1:], device=device) - 1
        self.model.compute_logits(hidden[last]).amax().item()


def set_num_threads(num_threads: int) -> None:
    """CPU threads that the model's operations use when called from the current thread."""
    torch.set_num_threads(num_threads)
