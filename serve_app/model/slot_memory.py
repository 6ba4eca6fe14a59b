"""What the device remembers of every slot between steps, so that a step need not bring it again.

Decides how a step's packed tokens reach the device: in one copy, those that the host does not know yet from the
history, and on the way the blocks that they fill are noted. Decode graphs do the same by a kernel.
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
    """history: int32 [slots, positions]: the ids that steps sample, which the host does not know yet, and of slots with
    penalties all others too.

    tables: int32 [slots, blocks], block tables for a backend that keeps them; else None. A slot's line is right up to
    the last token that has been placed: what a sequence brings along comes when it starts, then every token tells its
    own block.
    """

    def __init__(
        self, num_slots: int, max_model_len: int, block_size: int, device: torch.device, *, keeps_tables: bool
    ) -> None:
        self._block_size, self._device = block_size, device
        self.history = torch.zeros(num_slots, max_model_len + 1, dtype=torch.int32, device=device)
        blocks = -(-max_model_len // block_size)
        self.tables = torch.zeros(num_slots, blocks, dtype=torch.int32, device=device) if keeps_tables else None

    def start(self, start: SlotStart) -> None:
        """A sequence takes a slot."""
        if start.params.has_penalties:
            self._write(self.history, start.slot, start.token_ids)
        if self.tables is not None:
            self._write(self.tables, start.slot, start.block_ids)

    def _write(self, lines: Tensor, slot: int, ids: tuple[int, ...]) -> None:
        lines[slot, : len(ids)] = to_device(np.array(ids, dtype=np.int32), self._device)

    def note(self, rows: SamplingRows, token_ids: Sequence[int] | Tensor) -> None:
        """What a step has sampled at `rows`: ids, negative where one failed; the host may not know them yet."""
        seq_slots, num_tokens = to_device(np.stack([rows.seq_slots, rows.num_tokens]), self._device)
        ids = torch.as_tensor(token_ids, device=self._device)
        self.history[seq_slots, num_tokens] = ids.clamp_min(0).int()

    def place(self, packed: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Input ids, positions and KV slots of the packed tokens, int64 [T] on the device."""
        input_ids, positions, kv_slots, seq_slots = to_device(packed.host, self._device)
        if packed.has_unknown_ids:
            input_ids = torch.where(input_ids < 0, self.history[seq_slots, positions].long(), input_ids)
        if packed.has_drafts:
            # What follows a draft is sampled as if it had been.
            self.history[seq_slots, positions] = input_ids.int()
        if self.tables is not None:
            self.tables[seq_slots, positions // self._block_size] = (kv_slots // self._block_size).int()
        return input_ids, positions, kv_slots
