import pytest
import torch

from serve_app.core.step_plan import BlockCopy
from serve_app.errors import ConfigError
from serve_app.model import kv_cache
from serve_app.model.attention.reference import ReferenceAttention
from serve_app.model.attention.torch_cpu import TorchCpuAttention
from serve_app.model.attention_backend import AttentionBackend, AttentionLayer

LAYERS = [AttentionLayer(4, 2, 8, 8, 1.0), AttentionLayer(4, 1, 8, 16, 1.0)]
CPU = torch.device("cpu")
BACKENDS: list[AttentionBackend] = [TorchCpuAttention(), ReferenceAttention()]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_size_is_what_is_allocated(backend: AttentionBackend) -> None:
    cache = kv_cache.KVCache(backend, LAYERS, 5, torch.float32, CPU)
    allocated = sum(pool.nbytes for layer in cache.layers for pool in layer)
    assert allocated == 5 * kv_cache.bytes_per_block(LAYERS, backend.block_size, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_copies_read_all_sources_before_they_write(backend: AttentionBackend) -> None:
    cache = kv_cache.KVCache(backend, LAYERS, 4, torch.float32, CPU)
    pools = [pool for layer in cache.layers for pool in layer]
    for pool in pools:
        for block in range(4):
            pool.select(backend.block_dim, block).fill_(block)
    cache.copy_blocks([BlockCopy(1, 2), BlockCopy(2, 3)])
    for pool in pools:
        assert [int(pool.select(backend.block_dim, block).unique()) for block in range(4)] == [0, 1, 1, 2]


def test_a_pool_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2 blocks"):
        kv_cache.KVCache(TorchCpuAttention(), LAYERS, 1, torch.float32, CPU)
    with pytest.raises(ConfigError, match="cannot allocate a KV pool of"):
        kv_cache.KVCache(TorchCpuAttention(), LAYERS, 1 << 44, torch.float32, CPU)
