"""Hashes of computed prefixes.

A block's hash covers its tokens and, by its parent's hash, all before. Decides the hash of a block,
and which block has a hash. The scheduler decides when a block is published (at the commit of the
step that computed it), and the block pool decides which block is evicted. Hashes are equal in all
processes, so a router can compare them.
"""

import struct
from collections.abc import Sequence
from hashlib import sha256

from serve_app.core.block_pool import Block


def root_hash(cache_salt: str) -> bytes:
    """Return the parent hash of first blocks. The salt separates the prefix caches of tenants."""
    return sha256(cache_salt.encode("utf-8", "surrogatepass")).digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a whole block of `token_ids` after the prefix with hash `parent`."""
    return sha256(parent + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()


class PrefixCache:
    """Hash -> the block with that hash. SHA-256 does not collide, so tokens are not compared."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, Block] = {}

    def get(self, block_hash: bytes) -> Block | None:
        """Return the block with this hash, in use or free; None if there is none."""
        return self._blocks.get(block_hash)

    def publish(self, block: Block, block_hash: bytes) -> None:
        """Publish a computed block. If the hash exists, the earlier block keeps it.

        Tables are never rewritten to remove duplicates.
        """
        if block_hash not in self._blocks:
            block.hash = block_hash
            self._blocks[block_hash] = block

    def forget(self, block: Block) -> None:
        """Remove a block that will be overwritten."""
        if block.hash is not None:
            del self._blocks[block.hash]
            block.hash = None

    def check_invariants(self, blocks: Sequence[Block]) -> None:
        """Assert that hashes and blocks match one to one."""
        named = {block.hash: block for block in blocks if block.hash is not None}
        assert named == self._blocks, "a block's hash and the prefix cache disagree"
