"""Start and end of a decode step: fills in data that the host does not have, and stores data for
the next step.

tokens: int64 [4, rows]: input ids, positions, KV slots and sequence slots of single-token rows. A
row with a negative KV slot is padding. history, tables: int32 [slots, stride], as in `SlotMemory`.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "history_stride", "table_stride"])
def prepare(
    tokens, history, tables, kv_lens, table_lines, rows, history_stride, table_stride,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace negative ids with ids from the history, in place, and add the rows' newest blocks to
    the tables. Grid (blocks of rows).

    Writes kv_lens: int32 [rows], 0 for padding; table_lines: int32 [rows], the rows' lines of the
    tables.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    token_id = tl.load(tokens + row, mask=inside, other=0)
    position = tl.load(tokens + rows + row, mask=inside, other=0)
    kv_slot = tl.load(tokens + 2 * rows + row, mask=inside, other=-1)
    line = tl.load(tokens + 3 * rows + row, mask=inside, other=0)
    real = kv_slot >= 0
    sampled = tl.load(history + line * history_stride + position, mask=real & (token_id < 0), other=0)
    tl.store(tokens + row, tl.where(token_id < 0, sampled.to(tl.int64), token_id), mask=inside)
    tl.store(tables + line * table_stride + position // PAGE, (kv_slot // PAGE).to(tl.int32), mask=real)
    tl.store(kv_lens + row, tl.where(real, position + 1, 0).to(tl.int32), mask=inside)
    tl.store(table_lines + row, line.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["rows", "history_stride"])
def remember(tokens, token_ids, history, rows, history_stride, BLOCK: tl.constexpr):
    """Append the sampled ids, int64 [rows], to the rows' history. Grid (blocks of rows)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = tl.load(tokens + 2 * rows + row, mask=row < rows, other=-1) >= 0
    position = tl.load(tokens + rows + row, mask=real, other=0)
    line = tl.load(tokens + 3 * rows + row, mask=real, other=0)
    # A failed row has a negative id.
    token_id = tl.maximum(tl.load(token_ids + row, mask=real, other=0), 0)
    tl.store(history + line * history_stride + position + 1, token_id.to(tl.int32), mask=real)
