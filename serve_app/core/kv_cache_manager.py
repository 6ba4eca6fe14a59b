"""Block tables of requests: shared prefixes, allocation, and copy before write.

`find_prefixes`, `match` and `fork` are queries; `allocate`, `grow` and `free` change state. Does
not decide which requests run. `allocate` takes shared blocks first, so that making room cannot
evict them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from serve_app.core.block_pool import Block, BlockPool
from serve_app.core.config import SchedulerConfig
from serve_app.core.prefix_cache import PrefixCache, hash_block, root_hash
from serve_app.core.request import Request
from serve_app.core.step_plan import BlockCopy


@dataclass(frozen=True, slots=True)
class Prefix:
    """Computed tokens that a request can start from: whole blocks to share.

    `copied`: the block to copy if the prefix ends inside it.
    """

    num_tokens: int = 0
    shared: list[Block] = field(default_factory=list)
    copied: Block | None = None
    searched: bool = False
    """Whether the prefix cache was searched, rather than taking a sibling choice's blocks."""


class KVCacheManager:
    """The block tables of all running requests over one `BlockPool`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self.prefix_cache = PrefixCache()
        self._caches_prefixes = config.enable_prefix_cache
        self._copies: list[BlockCopy] = []

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def _hashes(self, request: Request, count: int) -> list[bytes]:
        """Return the hashes of the request's first blocks, at least `count`.

        Each is computed only once.
        """
        hashes, size = request.block_hashes, self.block_size
        for i in range(len(hashes), count):
            parent = hashes[-1] if hashes else root_hash(request.cache_salt)
            hashes.append(hash_block(parent, request.token_ids[i * size : (i + 1) * size]))
        return hashes

    def match(self, request: Request) -> Prefix:
        """Return the longest published prefix, in whole blocks."""
        limit = request.num_reusable_tokens // self.block_size
        shared: list[Block] = []
        for block_hash in self._hashes(request, limit)[:limit]:
            block = self.prefix_cache.get(block_hash)
            if block is None:
                break
            shared.append(block)
        return Prefix(len(shared) * self.block_size, shared, searched=True)

    def fork(self, request: Request, source: Request) -> Prefix:
        """Return the part of the prompt that `request` can share with `source`.

        `source`: a running choice of the same request. At least one token is left to compute. If
        that token is inside a block, the block is copied.
        """
        num_tokens = min(request.num_prompt_tokens, source.num_computed_tokens, request.num_tokens - 1)
        whole, rest = divmod(num_tokens, self.block_size)
        return Prefix(num_tokens, source.blocks[:whole], source.blocks[whole] if rest else None)

    def find_prefixes(self, request: Request) -> tuple[Prefix, ...]:
        """Return the prefixes that `request` may start from, longest first.

        They are published blocks, or the blocks of its running leader. The leader's blocks are in
        use and need no free block, so they may fit where published blocks do not.
        """
        leader = request.leader
        forked = Prefix()
        if leader is not None and leader.num_computed_tokens >= leader.num_prompt_tokens:
            forked = self.fork(request, leader)
        # A prompt's logprobs and mean exist only if its tokens are computed.
        if not self._caches_prefixes or not request.num_reusable_tokens:
            return (forked,)
        published = self.match(request)
        if forked.num_tokens == 0:
            return (published,)
        return (forked,) if forked.num_tokens >= published.num_tokens else (published, forked)

    def allocate(self, request: Request, prefix: Prefix, reserve: int) -> bool:
        """Allocate a table for all known tokens of `request`, starting with `prefix`, or nothing.

        `reserve` blocks must stay free. Returns whether the allocation succeeded.
        """
        count = self.blocks_for(request.num_tokens) - len(prefix.shared)
        revived = sum(block.ref_count == 0 for block in prefix.shared)
        if count + revived + reserve > self.pool.num_free:
            return False
        for block in prefix.shared:
            self.pool.share(block)
        new = self._take(count)
        if prefix.copied is not None:
            self._copies.append(BlockCopy(prefix.copied.id, new[0].id))
        request.blocks = prefix.shared + new
        request.num_computed_tokens = prefix.num_tokens
        request.num_published_blocks = len(prefix.shared)
        return True

    def can_grow(self, request: Request, num_tokens: int, reserve: int) -> bool:
        """Whether the next `num_tokens` fit.

        If new blocks are needed, `reserve` blocks must stay free.
        """
        count = self._missing(request, num_tokens)
        return count <= 0 or count + reserve <= self.pool.num_free

    def can_all_grow(self, requests: Iterable[Request]) -> bool:
        """Whether the next token of every request fits."""
        return sum(max(0, self._missing(request, 1)) for request in requests) <= self.pool.num_free

    def grow(self, request: Request, num_tokens: int) -> tuple[int, ...] | None:
        """Make room for the next `num_tokens`.

        Returns the ids of new blocks (maybe none); None if full.
        """
        # Fast path without a call, for most rows of most steps.
        if request.num_computed_tokens + request.num_in_flight + num_tokens <= len(request.blocks) * self.block_size:
            return ()
        count = self._missing(request, num_tokens)
        if count > self.pool.num_free:
            return None
        new = self._take(count)
        request.blocks += new
        return tuple(block.id for block in new)

    def _missing(self, request: Request, num_tokens: int) -> int:
        """Return how many blocks the table lacks for the next `num_tokens`; negative: too many."""
        num_tokens += request.num_computed_tokens + request.num_in_flight
        return -(-num_tokens // self.block_size) - len(request.blocks)

    def _take(self, count: int) -> list[Block]:
        new = self.pool.allocate(count)
        for block in new:
            self.prefix_cache.forget(block)
        return new

    def free(self, request: Request) -> None:
        """Free the request's table. None of its tokens count as computed any more."""
        self.pool.free(request.blocks)
        request.blocks = []
        request.num_computed_tokens = request.num_in_flight = request.num_awaited = 0
        request.num_published_blocks = 0

    def publish(self, request: Request) -> None:
        """Publish the request's full and computed blocks.

        Call it only when a finished step is committed.
        """
        count = request.num_computed_tokens // self.block_size
        if count > request.num_published_blocks and self._caches_prefixes:
            hashes = self._hashes(request, count)
            for i in range(request.num_published_blocks, count):
                self.prefix_cache.publish(request.blocks[i], hashes[i])
            request.num_published_blocks = count

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Return and clear the copies needed before the next step.

        Sources are never targets in the same step.
        """
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def check_invariants(self, running: Iterable[Request]) -> None:
        """Assert block conservation, private writable blocks, and correct hashes.

        No writable block may be shared or published.
        """
        tables = list(running)
        self.pool.check_invariants(request.blocks for request in tables)
        self.prefix_cache.check_invariants(self.pool.blocks)
        for request in tables:
            computed = request.num_computed_tokens
            assert self.blocks_for(computed) <= len(request.blocks), "computed tokens outside the table"
            parent = root_hash(request.cache_salt)
            for i, block in enumerate(request.blocks):
                start = i * self.block_size
                if start + self.block_size > computed:
                    assert block.ref_count == 1, f"block {block.id} is writable and shared"
                    assert block.hash is None, f"block {block.id} is writable and published"
                else:
                    parent = hash_block(parent, request.token_ids[start : start + self.block_size])
                    assert block.hash in (None, parent), f"block {block.id} is published under a wrong hash"
