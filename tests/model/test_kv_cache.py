from pathlib import Path

import pytest
import torch

from serve_app.core.output import BlockCopy
from serve_app.errors import ConfigError
from serve_app.model import kv_cache
from serve_app.model.attention.base import AttentionBackend, AttentionLayer
from serve_app.model.attention.cpu import CpuAttention
from serve_app.model.attention.reference import ReferenceAttention

LAYERS = [AttentionLayer(4, 2, 8, 8, 1.0), AttentionLayer(4, 1, 8, 16, 1.0)]
CPU = torch.device("cpu")
BACKENDS: list[AttentionBackend] = [CpuAttention(), ReferenceAttention()]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_size_is_what_is_allocated(backend: AttentionBackend) -> None:
    cache = kv_cache.KVCache(backend, LAYERS, 5, torch.float32, CPU)
    allocated = sum(pool.nbytes for layer in cache.layers for pool in layer)
    size = kv_cache.bytes_per_block(LAYERS, backend.block_size, torch.float32)
    assert allocated == 5 * size
    assert kv_cache.fitting_blocks(allocated, size) == 5
    assert kv_cache.fitting_blocks(allocated - 1, size) == 4


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
        kv_cache.KVCache(CpuAttention(), LAYERS, 1, torch.float32, CPU)
    with pytest.raises(ConfigError, match="cannot allocate a KV pool of"):
        kv_cache.KVCache(CpuAttention(), LAYERS, 1 << 44, torch.float32, CPU)


def test_available_memory_is_within_the_machine() -> None:
    total = next(
        int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line
    )
    assert 0 < kv_cache.available_memory(CPU) <= total


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_tightest_control_group_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "_own_cgroup", lambda: "pod/container")
    assert kv_cache._cgroup_available(tmp_path) == kv_cache._UNLIMITED
    write(tmp_path / "pod", memory__max="5000\n", memory__current="2000\n", memory__stat="anon 1\ninactive_file 300\n")
    write(tmp_path / "pod/container", memory__max="max\n", memory__current="1500\n")
    assert kv_cache._cgroup_available(tmp_path) == 3300
    write(tmp_path / "pod/container", memory__max="1600\n")
    assert kv_cache._cgroup_available(tmp_path) == 100


def test_a_container_that_sees_its_own_group_as_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "_own_cgroup", lambda: "docker/abc")
    write(tmp_path / "memory", memory__limit_in_bytes="900", memory__usage_in_bytes="1000")
    assert kv_cache._cgroup_available(tmp_path) == 0
