from hashlib import sha256

from serve_app.core.block_pool import Block
from serve_app.core.prefix_cache import PrefixCache, hash_block, root_hash


def test_a_name_depends_on_tokens_their_order_all_before_them_and_the_salt() -> None:
    root = root_hash("")
    names = {
        hash_block(root, (1, 2)),
        hash_block(root, (2, 1)),
        hash_block(root, (1, 2, 0)),
        hash_block(hash_block(root, (1, 2)), (1, 2)),
        hash_block(root_hash("tenant"), (1, 2)),
    }
    assert len(names) == 5


def test_a_name_is_the_same_in_every_process() -> None:
    expected = sha256(sha256(b"salt").digest() + (1).to_bytes(8, "little") + (258).to_bytes(8, "little")).digest()
    assert hash_block(root_hash("salt"), [1, 258]) == expected


def test_a_salt_may_be_any_string() -> None:
    assert root_hash("\udc80") != root_hash("\udc81")


def test_the_first_block_of_a_name_keeps_it() -> None:
    cache, first, second = PrefixCache(), Block(1), Block(2)
    cache.publish(first, b"x")
    cache.publish(second, b"x")
    assert cache.get(b"x") is first
    assert second.hash is None
    cache.forget(second)
    assert cache.get(b"x") is first
    cache.forget(first)
    assert cache.get(b"x") is None
    assert first.hash is None
