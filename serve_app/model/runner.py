"""Runs one step's plan on the model: apply it, run one packed forward pass, compute logits of
sampled rows, sample.

Decides how host arrays reach the device, the slices in which prompt log-probabilities are computed,
and which request made a step fail. Does not decide what runs (the scheduler) or how attention works
(the backend). Order of side effects in a step: slots and block tables, block copies, keys and
values of the batch, sampled tokens.

A step may be launched before the previous one is resolved. The ids sampled by the previous step are
then on the device, where the new step's rows and penalties find them by slot and position. If the
host must know them before a row may sample, sampling is launched after the previous step is
resolved, while the forward pass runs.
"""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serve_app.core.results import LOGPROBS, NO_RESULTS, ModelRunnerOutput, Results, TokenLogprob
from serve_app.core.step_plan import ScheduledRequest, SchedulerOutput
from serve_app.errors import EngineError, RequestError
from serve_app.grammars import Grammars
from serve_app.model.attention_backend import AttentionBatch, ResidentTables, block_matrix
from serve_app.model.input_batch import InputBatch, PackedBatch
from serve_app.model.paged_model import PagedModel
from serve_app.model.pooling import pool
from serve_app.model.sampling.grammar_masks import Awaited, GrammarMasks
from serve_app.model.sampling.rows import SamplingRows
from serve_app.model.sampling.sampler import PendingSample, Sampled, one_thread, rank
from serve_app.model.slot_memory import SlotMemory
from serve_app.model.token_samplers import Mended
from serve_app.model.transfer import to_device

logger = logging.getLogger(__name__)

_NO_TABLES = block_matrix([[]])
# Maximum number of logits that prompt log-probabilities materialize at once (approximately).
_LOGITS_PER_SLICE = 2**23


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A launched forward pass: the packed batch and its hidden states [T, hidden]. awaited: rows
    that sample with a grammar; choose: see `Decoded`.
    """

    packed: PackedBatch
    hidden: Tensor
    awaited: Sequence[Awaited]
    choose: Callable[[], PendingSample] | None = None


@dataclass(frozen=True, slots=True)
class Launched:
    """A step with its forward pass launched, or the error of the launch. waits: sampling must wait
    until the previous step is resolved.
    """

    rows: Sequence[ScheduledRequest]
    forwarded: Forwarded | Exception
    waits: bool


@dataclass(frozen=True, slots=True)
class Pending:
    """A completely launched step."""

    resolve: Callable[[], ModelRunnerOutput]
    """Wait for the step. Steps must be resolved in launch order, each once."""
    sat_out: frozenset[int] = frozenset()
    """See `ModelRunnerOutput`."""


class ModelRunner:
    """One rank's model with its slots.

    `launch` and `finish` run a step. An exception in a step ends only the requests that cause it.
    `finish` raises only if the model cannot even run a harmless token.
    """

    def __init__(self, model: PagedModel, max_num_seqs: int, grammars: Grammars | None = None) -> None:
        self.model = model
        self._masks = GrammarMasks(grammars)
        sizes = (max_num_seqs, model.max_model_len, model.block_size)
        self._batch = InputBatch(*sizes, knows_samples=not model.samples_on_device)
        self._scratch_block = 0
        self._memory: SlotMemory | None = None
        if model.samples_on_device or model.keeps_tables:
            self._memory = SlotMemory(*sizes, model.device, keeps_tables=model.keeps_tables)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate a pool of `num_blocks` blocks for the scheduler, and one more that only
        `profile_step` writes.
        """
        self.model.allocate_kv_cache(num_blocks + 1, self._memory)
        self._scratch_block = num_blocks

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> Launched:
        """Launch a step's forward pass. A previous step with drafts must be resolved first."""
        self._batch.apply(output)
        for start in output.slot_starts:
            self._batch.slot(start.slot).follower = self._masks.follower(start.params)
            if self._memory is not None:
                self._memory.start(start)
        if output.block_copies:
            self.model.copy_blocks(output.block_copies)
        waits = any(row.waits for row in output.rows)
        try:
            return Launched(output.rows, self.forward(output.rows), waits)
        except Exception as error:
            return Launched(output.rows, error, waits)

    def tokens_known(self, launched: Launched) -> None:
        """Start the grammar masks that waited for the previous step. Call it once that step is
        resolved.
        """
        if isinstance(launched.forwarded, Forwarded):
            self._masks.go_on(launched.forwarded.awaited)

    @torch.inference_mode()
    def finish(self, launched: Launched) -> Pending:
        """Launch the rest of a step."""
        try:
            if isinstance(launched.forwarded, Exception):
                raise launched.forwarded
            return self.sample(launched.forwarded)
        except Exception as error:
            result = self._run_one_by_one(launched.rows, error)
            return Pending(lambda: result, result.sat_out)

    def forward(self, rows: Sequence[ScheduledRequest]) -> Forwarded:
        """Launch the forward pass of `rows`, whose slots and blocks must be set. Writes their keys
        and values.
        """
        packed = self._batch.pack(rows)
        awaited = self._masks.begin(packed.rows, packed.slots)
        decoded = self.model.decode(packed)
        if decoded is not None:
            return Forwarded(packed, decoded.hidden, awaited, decoded.choose)
        memory, tables, resident = self._memory, _NO_TABLES, None
        if memory is None:
            input_ids, positions, kv_slots = (to_device(line, self.model.device) for line in packed.host[:3])
        else:
            input_ids, positions, kv_slots = memory.place(packed)
        if memory is None or memory.tables is None:
            tables = self._batch.block_tables(packed)
        else:
            resident = ResidentTables(memory.tables, packed.seq_slots)
        batch = AttentionBatch(packed.query_starts, packed.kv_lens, tables, kv_slots, resident, packed.wanted())
        return Forwarded(packed, self.model.forward(input_ids, positions, batch), awaited)

    def sample(self, forwarded: Forwarded) -> Pending:
        """Launch the rest of a step: tokens for each row that samples, and the requested
        log-probabilities.
        """
        packed = forwarded.packed
        self._masks.go_on(forwarded.awaited)
        held = self._masks.finish(forwarded.awaited, packed.sampling.masks)
        sat_out = frozenset(i for i, error in held.items() if error is None)
        sampled = self._sample_rows(forwarded)
        pooled = pool(packed, forwarded.hidden)
        prompt_results: dict[int, Results] = {
            i: {LOGPROBS: entries}
            for i, slot in enumerate(packed.slots)
            if slot.params.prompt_logprobs is not None and (entries := self._prompt_logprobs(forwarded, i))
        }
        # Last, so that a row that is run again after an exception finds its history unchanged.
        for i, (row, slot) in enumerate(zip(packed.rows, packed.slots, strict=True)):
            slot.num_tokens += row.samples and i not in held
        for i, so_far in pooled.so_far.items():
            packed.slots[i].pooled = so_far
        resolve = partial(self._resolve, packed, sampled, held, pooled.embeddings, prompt_results)
        if isinstance(sampled, Sampled):
            # The next step's penalties, if the host computes them, count these tokens.
            result = resolve()
            return Pending(lambda: result, sat_out)
        return Pending(resolve, sat_out)

    def _sample_rows(self, forwarded: Forwarded) -> PendingSample | Mended:
        """Sample a token for each of the step's sampling rows. Up to the first token that differs
        from its draft, a row's tokens are those that steps without drafts would have sampled.
        """
        rows, hidden = forwarded.packed.sampling, forwarded.hidden
        if not len(rows.tokens):
            return Sampled([])
        if forwarded.choose is not None and rows.plain.any():
            chosen = forwarded.choose()
            if rows.is_plain:
                return chosen
            others = np.flatnonzero(~rows.plain)
            return Mended(chosen, others.tolist(), self._launch_sampling(hidden, rows.part(others)))
        return self._launch_sampling(hidden, rows)

    def _launch_sampling(self, hidden: Tensor, rows: SamplingRows) -> PendingSample:
        """Sample a token for each of `rows`. hidden: hidden states of all the step's tokens."""
        if len(rows.tokens) < len(hidden):
            with one_thread():
                hidden = hidden[to_device(rows.tokens, hidden.device)]
        memory = self._memory
        sampled = self.model.sample(hidden, rows, None if memory is None else memory.history)
        if memory is not None:
            memory.note(rows, sampled.token_ids)
        return sampled

    def _resolve(
        self,
        packed: PackedBatch,
        pending: PendingSample | Mended,
        held: Mapping[int, RequestError | None],
        embeddings: Mapping[int, Results],
        prompt_results: dict[int, Results],
    ) -> ModelRunnerOutput:
        """Wait for the tokens, record them, and return each row's tokens.

        held: rows that cannot sample in this step; see `GrammarMasks.finish`.
        """
        sampled = pending.resolve()
        self._batch.remember(packed.sampling, sampled.token_ids)
        token_ids: list[tuple[int, ...]] = [()] * len(packed.rows)
        results = dict(embeddings)
        failed = {i: error for i, error in held.items() if error is not None}
        forced: dict[int, tuple[int, ...]] = {}
        first = 0
        for i, row in enumerate(packed.rows):
            if not row.samples:
                continue
            drafts, slot = row.draft_token_ids, packed.slots[i]
            if i in held:
                pass
            elif not drafts and not sampled.failed:
                token_ids[i] = (sampled.token_ids[first],)
            elif kept := sampled.accept(first, drafts):
                token_ids[i] = tuple(sampled.token_ids[j] for j in kept)
                slot.num_tokens += len(kept) - 1
            else:
                failed[i] = sampled.failed[first]
            if token_ids[i] and first in sampled.logprobs:
                results[i] = {
                    **results.get(i, NO_RESULTS),
                    LOGPROBS: tuple(sampled.logprobs[first + j] for j in range(len(token_ids[i]))),
                }
            if token_ids[i] and slot.follower is not None:
                slot.follower.consume(token_ids[i])
                forced[i] = slot.follower.forced()
            first += len(drafts) + 1
        sat_out = frozenset(held) - failed.keys()
        mask_s = self._masks.take_work_s()
        return ModelRunnerOutput(tuple(token_ids), results, prompt_results, failed, sat_out, forced, mask_s)

    def _prompt_logprobs(self, forwarded: Forwarded, index: int) -> tuple[TokenLogprob, ...]:
        """Return log-probabilities of the prompt tokens that row `index`'s positions predict."""
        packed = forwarded.packed
        row, slot = packed.rows[index], packed.slots[index]
        end = min(row.start + row.num_tokens, slot.num_prompt_tokens - 1)
        offset = packed.query_starts[index] - row.start
        first = max(row.start, slot.params.prompt_logprobs_from - 1)
        step = max(1, _LOGITS_PER_SLICE // self.model.vocab_size)
        entries: list[TokenLogprob] = []
        for begin in range(first, end, step):
            stop = min(begin + step, end)
            logits = self.model.compute_logits(forwarded.hidden[offset + begin : offset + stop])
            following: list[int] = slot.token_ids[begin + 1 : stop + 1].tolist()
            num_top = slot.params.prompt_logprobs or 0
            entries += rank(logits.log_softmax(-1), following, [num_top] * len(following))
        return tuple(entries)

    def _run_one_by_one(self, rows: Sequence[ScheduledRequest], error: Exception) -> ModelRunnerOutput:
        """Find the request that made the step fail. Running a row twice is harmless: it writes the
        same keys and values.
        """
        outputs: list[ModelRunnerOutput] = []
        for row in rows:
            try:
                outputs.append(self.sample(self.forward([row])).resolve())
            except Exception:
                # The client receives `failed`; only the log gets the exception's text, because it
                # may contain paths.
                logger.exception("the model failed on request %r", row.request_id)
                outputs.append(ModelRunnerOutput(((),), failed={0: EngineError("the model failed on this request")}))
        if all(output.failed for output in outputs):
            self._check_alive(error)
        return _joined(outputs)

    def _check_alive(self, error: Exception) -> None:
        """Raise the step's `error` if the model cannot even run a single harmless token."""
        try:
            self.profile_step(1, 1)
        except Exception:
            raise error from None

    def warm_up(self) -> None:
        """Run a step of one token, which reads all weights, possibly from a disk."""
        self.allocate_kv_cache(1)
        self.profile_step(1, 1)

    @torch.inference_mode()
    def profile_step(self, num_tokens: int, num_rows: int) -> None:
        """Run `num_tokens` zeros, split over `num_rows` rows. Their keys go to the scratch block,
        so no request changes.

        Takes the time and the working memory of such a step.
        """
        num_rows = min(num_rows, num_tokens)
        counts = [num_tokens // num_rows + (i < num_tokens % num_rows) for i in range(num_rows)]
        last = np.cumsum(counts) - 1
        hidden = self._profile_forward(counts, np.isin(np.arange(num_tokens), last))
        self.model.compute_logits(hidden[to_device(last, self.model.device)]).amax().item()

    @torch.inference_mode()
    def profile_decodes(self, num_rows: int, num_drafts: int) -> None:
        """Run a step of `num_rows` greedy decodes without keys, each with `num_drafts` drafts; as
        in `profile_step`.
        """
        hidden = self._profile_forward([1 + num_drafts] * num_rows)
        likeliest = self.model.executor.likeliest
        token_ids = self.model.compute_logits(hidden).argmax(-1) if likeliest is None else likeliest(hidden)
        token_ids.tolist()

    def _profile_forward(self, counts: list[int], wanted: npt.NDArray[np.bool_] | None = None) -> Tensor:
        """Return hidden states of zeros, with `counts[i]` tokens in row i."""
        block_size, device = self.model.block_size, self.model.device
        positions = torch.cat([torch.arange(count) for count in counts])
        batch = AttentionBatch(
            query_starts=[0, *itertools.accumulate(counts)],
            kv_lens=counts,
            block_tables=block_matrix([[self._scratch_block] * -(-count // block_size) for count in counts]),
            kv_slots=(positions % block_size + self._scratch_block * block_size).to(device),
            wanted=wanted,
        )
        return self.model.forward(torch.zeros_like(positions, device=device), positions.to(device), batch)


def _joined(outputs: Sequence[ModelRunnerOutput]) -> ModelRunnerOutput:
    """Join the outputs of single-row steps into one."""
    return ModelRunnerOutput(
        tuple(output.token_ids[0] for output in outputs),
        {i: output.results[0] for i, output in enumerate(outputs) if output.results},
        {i: output.prompt_results[0] for i, output in enumerate(outputs) if output.prompt_results},
        {i: output.failed[0] for i, output in enumerate(outputs) if output.failed},
        frozenset(i for i, output in enumerate(outputs) if output.sat_out),
        {i: output.forced[0] for i, output in enumerate(outputs) if output.forced},
        sum(output.mask_s for output in outputs),
    )


def set_num_threads(num_threads: int) -> None:
    """Set the number of CPU threads that the model's operations use when called from the current
    thread.
    """
    torch.set_num_threads(num_threads)
