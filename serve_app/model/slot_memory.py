"""Per-slot state kept on the device between steps, so that a step need not send it again.

Decides how a step's packed tokens reach the device. One copy sends them; ids that the host does not
know yet come from the history, and the blocks that they fill are recorded. In decode graphs a
kernel does the same.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from serve_app.core.step_plan import SlotStart
from serve_app.model.input_batch import PackedBatch
from serve_app.model.sampling.rows import SamplingRows
from serve_app.model.transfer import to_device


class SlotMemory:
    """The state of all slots.

    history: int32 [slots, positions]: the sampled ids, which the host may not know yet. For slots
    with penalties, all other ids too.

    tables: int32 [slots, blocks], block tables for a backend that keeps them, else None. A slot's
    line is valid up to its last placed token: a sequence's existing blocks are written when it
    starts, and every token then writes its own block.
    """

    def __init__(
        self, num_slots: int, max_model_len: int, block_size: int, device: torch.device, *, keeps_tables: bool
    ) -> None:
        self._block_size, self._device = block_size, device
        self.history = torch.zeros(num_slots, max_model_len + 1, dtype=torch.int32, device=device)
        blocks = -(-max_model_len // block_size)
        self.tables = torch.zeros(num_slots, blocks, dtype=torch.int32, device=device) if keeps_tables else None

    def start(self, start: SlotStart) -> None:
        """Write the state of a sequence that takes a slot."""
        if start.params.has_penalties:
            self._write(self.history, start.slot, start.token_ids)
        if self.tables is not None:
            self._write(self.tables, start.slot, start.block_ids)

    def _write(self, lines: Tensor, slot: int, ids: tuple[int, ...]) -> None:
        lines[slot, : len(ids)] = to_device(np.array(ids, dtype=np.int32), self._device)

    def note(self, rows: SamplingRows, token_ids: Sequence[int] | Tensor) -> None:
        """Record the ids that a step sampled at `rows`; negative for rows that failed. The host may
        not know them yet.
        """
        seq_slots, num_tokens = to_device(np.stack([rows.seq_slots, rows.num_tokens]), self._device)
        ids = torch.as_tensor(token_ids, device=self._device)
        self.history[seq_slots, num_tokens] = ids.clamp_min(0).int()

    def place(self, packed: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the input ids, positions and KV slots of the packed tokens, int64 [T] on the
        device.
        """
        input_ids, positions, kv_slots, seq_slots = to_device(packed.host, self._device)
        if packed.has_unknown_ids:
            input_ids = torch.where(input_ids < 0, self.history[seq_slots, positions].long(), input_ids)
        if packed.has_drafts:
            # Tokens after a draft are sampled as if the draft were part of the output.
            self.history[seq_slots, positions] = input_ids.int()
        if self.tables is not None:
            self.tables[seq_slots, positions // self._block_size] = (kv_slots // self._block_size).int()
        return input_ids, positions, kv_slots
