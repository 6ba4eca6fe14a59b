"""The KV blocks of one engine: who holds which, and which free one is taken next.

Decides: the order in which free blocks are reused. Does not know tokens, hashes' meaning, or requests; what a block
holds lives on the device. The free list is intrusive (the links are fields of the blocks), so that a block in its
middle, found by the prefix cache or as a physical neighbour, leaves it in O(1).
"""

from collections.abc import Iterable, Sequence


class Block:
    """One KV block. `hash` is set while the prefix cache knows its content; `ref_count` counts block tables."""

    __slots__ = ("hash", "id", "next", "previous", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.ref_count = 0
        self.hash: bytes | None = None
        self.previous: Block = self
        self.next: Block = self


class BlockPool:
    """All blocks, and the list of free ones: front = reused next.

    Blocks without a published prefix are worthless once free and go to the front; published ones go to the back and
    are evicted least recently used first. A table is freed from its tail on, because a chain is matched from its head:
    the tail must be evicted first. Block 0 is the null block: never handed out, so that id 0 can mean "nothing".
    """

    def __init__(self, num_blocks: int, num_tables: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.ref_count = 1
        self.num_free = 0
        self.num_free_cached = 0
        self._free = Block(-1)  # sentinel of the ring: its next is the front, its previous the back
        # Attention reads a table whose blocks are consecutive as one view of the pool instead of gathering it. So the
        # first blocks of `num_tables` tables lie a stride apart, and `allocate` lets each table grow into its gap.
        stride = max(1, (num_blocks - 1) // num_tables)
        for offset in range(stride):
            for block in self.blocks[1 + offset :: stride]:
                self._link(block, self._free)

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

    def _successor(self, block: Block | None) -> Block:
        """The block to take after `block` in one table: its physical neighbour if that costs no cached prefix."""
        if block is not None and block.id + 1 < len(self.blocks):
            neighbour = self.blocks[block.id + 1]
            if neighbour.ref_count == 0 and neighbour.hash is None:
                return neighbour
        return self._free.next

    def allocate(self, count: int, after: Block | None = None) -> list[Block]:
        """Take `count` free blocks (the caller checks `num_free`) for a table that ends with `after`.

        They may still carry the hash of an evicted prefix: the caller makes the prefix cache forget it.
        """
        taken: list[Block] = []
        last = after
        for _ in range(count):
            last = self._successor(last)
            self._unlink(last)
            last.ref_count = 1
            taken.append(last)
        if after is None:
            taken.sort(key=lambda block: block.id)  # evicted chains come tail first; ascending they are consecutive
        return taken

    def share(self, block: Block) -> None:
        """One more table holds `block`, which may be free so far (a hit of the prefix cache)."""
        if block.ref_count == 0:
            self._unlink(block)
        block.ref_count += 1

    def free(self, table: Sequence[Block]) -> None:
        """One table less holds these blocks."""
        for block in reversed(table):
            block.ref_count -= 1
            if block.ref_count == 0:
                self._link(block, self._free.next if block.hash is None else self._free)

    def check_invariants(self, tables: Iterable[Sequence[Block]]) -> None:
        """Assert that free + used + null = total and that reference counts equal the tables that hold each block."""
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
