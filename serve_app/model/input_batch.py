"""What the runner remembers between steps, per slot, and the packed row that it builds from a step's plan.

Decides: how token ids, block tables and parameters are kept (numpy on the host, one line per slot) and how a
`SchedulerOutput` becomes arrays. Does not decide who runs (the scheduler) or what is done with the arrays (the runner).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from serve_app.core.output import ScheduledRequest, SchedulerOutput, SlotStart
from serve_app.core.sampling_params import SamplingParams

Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True)
class Slot:
    """One running choice. `token_ids` is the slot's line of the batch's table; the first `num_tokens` are there,
    but for those that a step in flight samples. While a step with draft tokens runs, these stand behind them."""

    request_id: str
    choice: int
    params: SamplingParams
    num_prompt_tokens: int
    num_tokens: int
    token_ids: Int64Array
    block_ids: list[int]

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known so far, those of a failed-over run included."""
        return self.num_tokens - self.num_prompt_tokens

    def ahead(self, count: int) -> "Slot":
        """This slot as it will be if its first `count` drafts are right."""
        return replace(self, num_tokens=self.num_tokens + count) if count else self


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One step's tokens, all requests behind one another: T tokens of R rows, no padding.

    `host`: int64 [3, T], the lines being input ids, positions and slot mapping (one array, so that it reaches the
    device in one copy). Row i owns tokens [query_starts[i], query_starts[i + 1]). An id that a step in flight samples
    in slot s is -1 - s; `has_unknown_ids` says whether there are any.
    """

    rows: tuple[ScheduledRequest, ...]
    slots: tuple[Slot, ...]
    host: Int64Array
    query_starts: list[int]
    kv_lens: list[int]
    block_tables: list[Int64Array]
    has_unknown_ids: bool


class InputBatch:
    """Per-slot state of everything that runs."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        # One more than the context: the last token that a request may be given is never an input. numpy asks the
        # system for zeroed pages, so lines cost memory only as far as they are written.
        self._token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self._block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int64)
        self._slots: list[Slot | None] = [None] * max_num_seqs

    def apply(self, output: SchedulerOutput) -> None:
        """Seat the slot starts of the step, append the new blocks of its rows and write down their drafts."""
        for start in output.slot_starts:
            self._start(start)
        for row in output.rows:
            if row.new_block_ids:
                slot = self._slot(row.slot)
                known = len(slot.block_ids)
                self._block_tables[row.slot, known : known + len(row.new_block_ids)] = row.new_block_ids
                slot.block_ids.extend(row.new_block_ids)
            if row.draft_token_ids:
                slot = self._slot(row.slot)
                slot.token_ids[slot.num_tokens : slot.num_tokens + len(row.draft_token_ids)] = row.draft_token_ids

    def pack(self, rows: Sequence[ScheduledRequest]) -> PackedRow:
        """The packed row of `rows` (all of a step's, or a part of them after a failure)."""
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        ends = np.cumsum(counts)
        total = int(ends[-1])
        slot_of_token = np.repeat(slots, counts)
        host = np.empty((3, total), dtype=np.int64)
        positions = host[1]
        positions[:] = np.arange(total) + np.repeat(starts - ends + counts, counts)
        host[0] = self._token_ids[slot_of_token, positions]
        unknown = np.array([row.token_in_flight for row in rows])
        host[0, ends[unknown] - 1] = -1 - slots[unknown]
        block, offset = np.divmod(positions, self.block_size)
        host[2] = self._block_tables[slot_of_token, block] * self.block_size + offset
        seated = tuple(self._slot(row.slot) for row in rows)
        blocks = -(-(starts + counts) // self.block_size)
        return PackedRow(
            rows=tuple(rows),
            slots=seated,
            host=host,
            query_starts=[0, *ends.tolist()],
            kv_lens=(starts + counts).tolist(),
            block_tables=[self._block_tables[slot, :used] for slot, used in zip(slots, blocks, strict=True)],
            has_unknown_ids=bool(unknown.any()),
        )

    def remember(self, row: ScheduledRequest, slot: Slot, token_ids: Sequence[int]) -> None:
        """Write down what `row` of `slot` sampled. The slot may have been given to somebody else meanwhile."""
        if self._slots[row.slot] is slot:
            end = row.start + row.num_tokens - len(row.draft_token_ids)
            slot.token_ids[end : end + len(token_ids)] = token_ids
            if row.draft_token_ids:
                slot.num_tokens = end + len(token_ids)

    def _start(self, start: SlotStart) -> None:
        line = self._token_ids[start.slot]
        line[: len(start.token_ids)] = start.token_ids
        self._block_tables[start.slot, : len(start.block_ids)] = start.block_ids
        self._slots[start.slot] = Slot(
            request_id=start.request_id,
            choice=start.choice,
            params=start.params,
            num_prompt_tokens=start.num_prompt_tokens,
            num_tokens=len(start.token_ids),
            token_ids=line,
            block_ids=list(start.block_ids),
        )

    def _slot(self, index: int) -> Slot:
        slot = self._slots[index]
        if slot is None:
            raise RuntimeError(f"slot {index} was scheduled before it was started")
        return slot
