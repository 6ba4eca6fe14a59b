"""The KV blocks of one engine: reference counts, and the order in which free blocks are reused.

Independent of tokens, requests and the meaning of hashes; the content of a block is on the device.
The free list is intrusive (its links are fields of the blocks), so removing a block found by the
prefix cache is O(1).
"""

from collections.abc import Iterable, Sequence


class Block:
    """One KV block. `ref_count`: block tables that contain it.

    `hash`: set while it is in the prefix cache.
    """

    __slots__ = ("hash", "id", "next", "previous", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.ref_count = 0
        self.hash: bytes | None = None
        self.previous: Block = self
        self.next: Block = self


class BlockPool:
    """All blocks, and the list of free blocks, whose front is reused next.

    Free blocks without a published prefix go to the front. Published ones go to the back, so that
    the least recently used is evicted first. A table is freed from its tail, because a chain is
    matched from its head, so its tail must be evicted first. Block 0 is the null block. It is never
    allocated, so id 0 can mean "no block".
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.blocks[0].ref_count = 1
        self.num_free = 0
        self.num_free_cached = 0
        self._free = Block(-1)  # sentinel of the ring: its next is the front, its previous the back
        for block in self.blocks[1:]:
            self._link(block, self._free)

    def usage(self) -> tuple[int, int, int]:
        """Return (usable blocks, blocks in use, free blocks that still have a published prefix)."""
        total = len(self.blocks) - 1
        return total, total - self.num_free, self.num_free_cached

    def _link(self, block: Block, successor: Block) -> None:
        block.previous, block.next = successor.previous, successor
        successor.previous.next = block
        successor.previous = block
        self.num_free += 1
        self.num_free_cached += block.hash is not None

    def _unlink(self, block: Block) -> None:
        block.previous.next = block.next
        block.next.previous = block.previous
        self.num_free -= 1
        self.num_free_cached -= block.hash is not None

    def allocate(self, count: int) -> list[Block]:
        """Take `count` free blocks. The caller checks `num_free`.

        They may still have the hash of an evicted prefix, which the caller must remove from the
        prefix cache.
        """
        taken: list[Block] = []
        for _ in range(count):
            block = self._free.next
            self._unlink(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def share(self, block: Block) -> None:
        """Add a reference to `block`, which may be free (a prefix cache hit)."""
        if block.ref_count == 0:
            self._unlink(block)
        block.ref_count += 1

    def free(self, table: Sequence[Block]) -> None:
        """Remove one reference from each block of `table`."""
        for block in reversed(table):
            block.ref_count -= 1
            if block.ref_count == 0:
                self._link(block, self._free.next if block.hash is None else self._free)

    def check_invariants(self, tables: Iterable[Sequence[Block]]) -> None:
        """Assert that free + used + null = total, and that reference counts match the tables."""
        held = [0] * len(self.blocks)
        held[0] = 1
        for table in tables:
            for block in table:
                held[block.id] += 1
        free = set()
        block = self._free.next
        while block is not self._free:
            assert block.id not in free, f"block {block.id} is twice in the free list"
            free.add(block.id)
            assert block.next.previous is block, "the free list's links disagree"
            block = block.next
        for block in self.blocks:
            assert block.ref_count == held[block.id], f"block {block.id}: {block.ref_count} refs, {held[block.id]} held"
            assert (block.ref_count == 0) == (block.id in free), f"block {block.id} is lost, or free and in use"
        assert len(free) == self.num_free, "num_free is wrong"
        assert sum(self.blocks[i].hash is not None for i in free) == self.num_free_cached, "num_free_cached is wrong"
