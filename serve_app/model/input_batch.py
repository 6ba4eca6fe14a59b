"""Per-slot state that the runner keeps between steps, and the packed batch of a step.

Decides how token ids, block tables and parameters are kept (numpy arrays on the host, indexed by
slot, written when a sequence starts) and how a `SchedulerOutput` becomes arrays. Does not decide
which requests run (the scheduler) or how the arrays are used (the runner).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from serve_app.core.step_plan import ScheduledRequest, SchedulerOutput, SlotStart
from serve_app.model.sampling import noise
from serve_app.model.sampling.columns import Column, request_columns
from serve_app.model.sampling.noise import Int64Array
from serve_app.model.sampling.rows import SamplingRows, Slot

_NEVER = 2**62


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One step's tokens, request by request: T tokens of R rows, without padding.

    host: int64 [4, T]: input ids, positions, KV slots and sequence slots, in one array, so that one
    copy sends it to the device. Row i owns tokens [query_starts[i], query_starts[i + 1]). Ids that
    a step in flight samples are -1; `has_unknown_ids` is true if there are any. seq_slots: int64
    [R].
    """

    rows: tuple[ScheduledRequest, ...]
    slots: tuple[Slot, ...]
    host: Int64Array
    query_starts: list[int]
    kv_lens: list[int]
    seq_slots: Int64Array
    has_unknown_ids: bool
    has_drafts: bool
    sampling: SamplingRows

    def wanted(self) -> npt.NDArray[np.bool_] | None:
        """Return `AttentionBatch.wanted`: the sampling positions, and all tokens of prompts that
        return per-token results or mean embeddings.
        """
        num_tokens = self.query_starts[-1]
        if len(self.sampling.tokens) == num_tokens:
            return None
        wanted = np.zeros(num_tokens, dtype=np.bool_)
        wanted[self.sampling.tokens] = True
        for i, slot in enumerate(self.slots):
            if slot.params.wants_prompt_results or slot.params.pooling == "mean":
                wanted[self.query_starts[i] : self.query_starts[i + 1]] = True
        return wanted


class InputBatch:
    """Per-slot state of all running sequences."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, *, knows_samples: bool = False) -> None:
        """knows_samples: whether a step's samples are always recorded before the next step is
        packed.
        """
        self.block_size, self._knows_samples = block_size, knows_samples
        # One more than the context: a request's last possible token is never an input. numpy asks
        # the system for zeroed pages, so the table uses memory only where it is written.
        self._token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self._block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self._slots: list[Slot | None] = [None] * max_num_seqs
        self._generations = np.zeros(max_num_seqs, dtype=np.int64)
        self._parameters = np.zeros((max_num_seqs, Column.NOISE))
        self._noise_keys = np.zeros(max_num_seqs, dtype=np.uint64)
        # Number of tokens from which on a slot's logits are neither changed nor returned.
        self._plain_from = np.zeros(max_num_seqs, dtype=np.int64)

    def apply(self, output: SchedulerOutput) -> None:
        """Start the sequences that get a slot in this step, then record its rows' new blocks and
        drafts.
        """
        for start in output.slot_starts:
            self._start(start)
        for row in output.rows:
            if row.new_block_ids:
                slot = self.slot(row.slot)
                known = slot.num_blocks
                self._block_tables[row.slot, known : known + len(row.new_block_ids)] = row.new_block_ids
                slot.num_blocks += len(row.new_block_ids)
            if row.draft_token_ids:
                slot = self.slot(row.slot)
                slot.token_ids[slot.num_tokens : slot.num_tokens + len(row.draft_token_ids)] = row.draft_token_ids

    def pack(self, rows: Sequence[ScheduledRequest]) -> PackedBatch:
        """Return the packed batch of `rows`: all rows of a step, or some rows after a failure."""
        # each field holds the values of all rows
        columns: Any = ScheduledRequest._make(zip(*rows, strict=True))
        slots = tuple(map(self.slot, columns.slot))
        seq_slots, counts, starts = (
            np.array(column, dtype=np.int64) for column in (columns.slot, columns.num_tokens, columns.start)
        )
        ends, kv_lens = counts.cumsum(), starts + counts
        host = np.empty((4, int(ends[-1])), dtype=np.int64)
        input_ids, positions, kv_slots, token_seq_slots = host
        token_seq_slots[:] = seq_slots.repeat(counts)
        positions[:] = np.arange(host.shape[1])
        positions += (kv_lens - ends).repeat(counts)
        input_ids[:] = self._token_ids[token_seq_slots, positions]
        num_drafts = [len(drafts) for drafts in columns.draft_token_ids]
        has_unknown_ids = not self._knows_samples and any(columns.token_in_flight)
        if has_unknown_ids:
            lasts = ends - 1 - np.array(num_drafts)
            input_ids[lasts[np.array(columns.token_in_flight)]] = -1
        block, offset = np.divmod(positions, self.block_size)
        kv_slots[:] = self._block_tables[token_seq_slots, block]
        kv_slots *= self.block_size
        kv_slots += offset
        num_samples = np.array(columns.samples, dtype=np.int64) * (1 + np.array(num_drafts))
        return PackedBatch(
            rows=tuple(rows),
            slots=slots,
            host=host,
            query_starts=[0, *ends.tolist()],
            kv_lens=kv_lens.tolist(),
            seq_slots=seq_slots,
            has_unknown_ids=has_unknown_ids,
            has_drafts=any(num_drafts),
            sampling=self._sampling_rows(slots, host, ends, num_samples),
        )

    def block_tables(self, packed: PackedBatch) -> npt.NDArray[np.int32]:
        """Return the block tables of the batch's rows, cut to the longest: int32 [R, most blocks of
        a row].
        """
        return self._block_tables[packed.seq_slots, : -(-max(packed.kv_lens) // self.block_size)]

    def _sampling_rows(
        self, slots: tuple[Slot, ...], host: Int64Array, ends: Int64Array, num_samples: Int64Array
    ) -> SamplingRows:
        row = np.arange(len(slots)).repeat(num_samples)
        tokens = (ends - num_samples.cumsum())[row] + np.arange(len(row))
        num_tokens, seq_slots = host[1, tokens] + 1, host[3, tokens]
        parameters = np.empty((len(row), len(Column)))
        parameters[:, : Column.NOISE] = self._parameters[seq_slots]
        parameters[:, Column.NOISE] = 0.0
        if parameters[:, Column.TEMPERATURE].any():
            parameters[:, Column.NOISE] = noise.at(self._noise_keys[seq_slots], num_tokens)
        owners = [slots[i] for i in row.tolist()]
        plain = num_tokens >= self._plain_from[seq_slots]
        return SamplingRows(tokens, seq_slots, self._generations[seq_slots], num_tokens, owners, parameters, plain)

    def remember(self, rows: SamplingRows, token_ids: Sequence[int]) -> None:
        """Record the sampled ids, one per row, except in slots where another sequence has since
        started.
        """
        same = rows.generations == self._generations[rows.seq_slots]
        self._token_ids[rows.seq_slots[same], rows.num_tokens[same]] = np.array(token_ids, dtype=np.int64)[same]

    def _start(self, start: SlotStart) -> None:
        line, params = self._token_ids[start.slot], start.params
        line[: len(start.token_ids)] = start.token_ids
        self._block_tables[start.slot, : len(start.block_ids)] = start.block_ids
        self._parameters[start.slot] = request_columns(params)
        self._noise_keys[start.slot] = noise.keys([params.seed or 0], [start.choice])[0]
        plain = not params.edits_logits and params.logprobs is None
        self._plain_from[start.slot] = start.num_prompt_tokens + params.min_tokens if plain else _NEVER
        self._generations[start.slot] += 1
        self._slots[start.slot] = Slot(
            request_id=start.request_id,
            choice=start.choice,
            params=params,
            num_prompt_tokens=start.num_prompt_tokens,
            num_tokens=len(start.token_ids),
            token_ids=line,
            num_blocks=len(start.block_ids),
        )

    def slot(self, index: int) -> Slot:
        """Return the state of a slot. Raises RuntimeError if no sequence was started in it."""
        slot = self._slots[index]
        if slot is None:
            raise RuntimeError(f"slot {index} was scheduled before it was started")
        return slot


def sampling_rows(starts: Sequence[SlotStart]) -> SamplingRows:
    """Return the rows of a step that samples one token after each of `starts`. The starts use slots
    0, 1, ... and no blocks.
    """
    batch = InputBatch(len(starts), max(len(start.token_ids) for start in starts), 1)
    batch.apply(SchedulerOutput(0, (), tuple(starts), (), 0))
    rows = [
        ScheduledRequest(start.slot, start.request_id, start.choice, len(start.token_ids) - 1, 1, (), True, False)
        for start in starts
    ]
    return batch.pack(rows).sampling
