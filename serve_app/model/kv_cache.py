"""The paged KV pool of the whole model: its allocation, its size in bytes, copies of blocks, and free memory.

Which block belongs to whom is the scheduler's business; the layout inside a block is the attention backend's.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from serve_app.core.output import BlockCopy
from serve_app.errors import ConfigError
from serve_app.model.attention.base import AttentionBackend, AttentionLayer
from serve_app.model.transfer import to_device


class KVCache:
    """One `LayerCache` per attention layer; block 0 is the null block, which nobody writes."""

    def __init__(
        self,
        backend: AttentionBackend,
        layers: Sequence[AttentionLayer],
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if num_blocks < 2:
            raise ConfigError(f"the KV pool needs at least 2 blocks (one is the null block), got {num_blocks}")
        try:
            self.layers = [backend.allocate(layer, num_blocks, dtype, device) for layer in layers]
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(f"cannot allocate a KV pool of {num_blocks} blocks on {device}: {error}") from error
        self.num_blocks = num_blocks
        self._block_dim = backend.block_dim

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in every layer; all sources are read before any target is written."""
        if not copies:
            return
        device = self.layers[0].key.device
        sources, targets = to_device(np.array([(copy.source, copy.target) for copy in copies]).T.copy(), device)
        dim = self._block_dim
        for layer in self.layers:
            for pool in layer:
                # Not every operation knows numbers of 8 bits.
                blocks = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
                blocks.index_copy_(dim, targets, blocks.index_select(dim, sources))


def bytes_per_block(layers: Sequence[AttentionLayer], block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers, in bytes."""
    values = sum(layer.num_kv_heads * (layer.head_dim + layer.value_dim) for layer in layers)
    return values * block_size * dtype.itemsize


def fitting_blocks(memory: int, block_bytes: int) -> int:
    """How many blocks fit into `memory` bytes (the null block counted)."""
    return max(0, memory // block_bytes)


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`.

    On Linux CPUs: what the kernel calls available, and no more than the control group's limit leaves.
    """
    if device.type == "cuda":
        # What torch keeps for itself is not counted: the largest step that was run needs it again.
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return min(_meminfo_available(Path("/proc/meminfo")), _cgroup_available(Path("/sys/fs/cgroup")))


def _meminfo_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"{meminfo} does not tell MemAvailable; set the size of the KV cache in the configuration")


_UNLIMITED = 1 << 62


def _cgroup_available(root: Path) -> int:
    """What the memory limits of this process's control groups (version 2, then 1) leave; huge when unlimited."""
    own = _own_cgroup()
    left = _UNLIMITED
    for base, limit_name, usage_name, reclaimable in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        group = base / own
        # A container often mounts its own group as the root, so the path from /proc may not exist below it.
        for folder in [group, *group.parents] if group.is_dir() else [base]:
            if not folder.is_relative_to(base):
                break
            limit, usage = _read_number(folder / limit_name), _read_number(folder / usage_name)
            if limit is not None and usage is not None and limit < _UNLIMITED:
                # Page cache counts as usage though the kernel gives it back under pressure.
                left = min(left, max(0, limit - usage + _stat(folder / "memory.stat", reclaimable)))
    return left


def _own_cgroup() -> str:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            return path.lstrip("/")
    return ""


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == key), 0)
