"""Names for computed prefixes: a block's hash covers its tokens and, through its parent's hash, all before them.

Decides a block's name, and which block has a name. The scheduler decides when a block may be named (at the commit of
the step that computed it), and the block pool which one is evicted. Names are equal in all processes, so a router can
compare them.
"""

import struct
from collections.abc import Sequence
from hashlib import sha256

from serve_app.core.block_pool import Block


def root_hash(cache_salt: str) -> bytes:
    """The parent of a first block. The salt is part of every name below it: other tenants never hit it."""
    return sha256(cache_salt.encode("utf-8", "surrogatepass")).digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of the block of `token_ids` (one whole block) after the prefix named `parent`."""
    return sha256(parent + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()


class PrefixCache:
    """Hash -> the one block that carries it. SHA-256 does not collide, so tokens are not compared again."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, Block] = {}

    def get(self, block_hash: bytes) -> Block | None:
        """The block with this content, in use or free."""
        return self._blocks.get(block_hash)

    def publish(self, block: Block, block_hash: bytes) -> None:
        """Name a computed block. The first block of a name keeps it: tables are never rewritten to remove doubles."""
        if block_hash not in self._blocks:
            block.hash = block_hash
            self._blocks[block_hash] = block

    def forget(self, block: Block) -> None:
        """The block is about to be overwritten."""
        if block.hash is not None:
            del self._blocks[block.hash]
            block.hash = None

    def check_invariants(self, blocks: Sequence[Block]) -> None:
        """Assert that names and blocks agree one to one."""
        named = {block.hash: block for block in blocks if block.hash is not None}
        assert named == self._blocks, "a block's hash and the prefix cache disagree"
