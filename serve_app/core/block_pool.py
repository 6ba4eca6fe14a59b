"""The KV blocks of one engine: who holds which, and which free one is taken next.

Decides: the order in which free blocks are reused. Does not know tokens, hashes' meaning, or requests; what a block
holds lives on the device. The free list is intrusive (the links are fields of the blocks), so that a block in its
middle, found by the prefix cache or as a physical neighbour, leaves it in O(1).
"""

from collections.abc import Iterable, Sequence


class Block:
    """One KV block. `ref_count` counts block tables; `hash` is set while the prefix cache knows the content.

    `wanted`: that content has been shared before, or a preempted request will come back for it.
    """

    __slots__ = ("hash", "id", "next", "previous", "ref_count", "wanted")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.ref_count = 0
        self.hash: bytes | None = None
        self.wanted = False
        self.previous: Block = self
        self.next: Block = self


class BlockPool:
    """All blocks, and the list of free ones: front = reused next.

    Blocks without a published prefix are worthless once free and go to the front; published ones go to the back and
    are evicted least recently used first. A table is freed from its tail on, because a chain is matched from its head:
    the tail must be evicted first. Block 0 is the null block: never handed out, so that id 0 can mean "nothing".

    Attention reads a table whose blocks are consecutive as one view of the pool instead of gathering it. So, before
    the list is asked, a table grows into its physical neighbour, and a new table starts where a whole run is vacant,
    each further on than the last one (so that the run stays its own, and a region is reused long after it was filled).
    Vacant = free and not wanted: prefixes that proved useful leave only by the list's order.
    """

    def __init__(self, num_blocks: int, num_tables: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.blocks[0].ref_count = 1
        self.num_free = 0
        self.num_free_cached = 0
        self._free = Block(-1)  # sentinel of the ring: its next is the front, its previous the back
        self._vacant = bytearray(num_blocks)  # by block id, so that a run is found by `bytearray.find`
        self._next_start = 1
        self._longest_run = max(1, (num_blocks - 1) // num_tables)  # a fair share of the pool
        for block in self.blocks[1:]:
            self._link(block, self._free)

    def usage(self) -> tuple[int, int, int]:
        """(usable blocks, those in use, free ones that still hold a published prefix)."""
        total = len(self.blocks) - 1
        return total, total - self.num_free, self.num_free_cached

    def _link(self, block: Block, successor: Block) -> None:
        block.previous, block.next = successor.previous, successor
        successor.previous.next = block
        successor.previous = block
        self._vacant[block.id] = block.hash is None or not block.wanted
        self.num_free += 1
        self.num_free_cached += block.hash is not None

    def _unlink(self, block: Block) -> None:
        block.previous.next = block.next
        block.next.previous = block.previous
        self._vacant[block.id] = False
        self.num_free -= 1
        self.num_free_cached -= block.hash is not None

    def _find_start(self, count: int, room: int) -> Block | None:
        """The first block of a vacant run for a new table of `count` blocks, better one it can grow in to `room`."""
        for length in (max(count, min(room, self._longest_run)), count):
            for search_from in (self._next_start, 1):
                start = self._vacant.find(b"\1" * length, search_from)
                if start > 0:
                    self._next_start = start + length
                    return self.blocks[start]
        return None

    def _neighbour(self, block: Block) -> Block | None:
        after = block.id + 1
        return self.blocks[after] if after < len(self.blocks) and self._vacant[after] else None

    def allocate(self, count: int, after: Block | None = None, room: int = 0) -> list[Block]:
        """Take `count` free blocks (the caller checks `num_free`) for a table that ends with `after`.

        A new table (`after` None) is expected to grow to `room` blocks. The blocks may still carry the hash of an
        evicted prefix: the caller makes the prefix cache forget it.
        """
        taken: list[Block] = []
        block = self._find_start(count, room) if after is None else self._neighbour(after)
        for _ in range(count):
            block = block or self._free.next
            self._unlink(block)
            block.ref_count = 1
            block.wanted = False
            taken.append(block)
            block = self._neighbour(block)
        return taken

    def share(self, block: Block) -> None:
        """One more table holds `block`, which may be free so far (a hit of the prefix cache)."""
        if block.ref_count == 0:
            self._unlink(block)
        block.ref_count += 1
        block.wanted = True

    def free(self, table: Sequence[Block], *, wanted: bool = False) -> None:
        """One table less holds these blocks; `wanted` marks them."""
        for block in reversed(table):
            block.wanted |= wanted
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
