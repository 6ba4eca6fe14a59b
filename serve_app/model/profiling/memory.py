"""Free memory of a device, and the number of KV blocks that fit into it.

On Linux CPUs the limits of control groups apply in addition to the machine's memory.
"""

import logging
from pathlib import Path

import torch

from serve_app.errors import ConfigError
from serve_app.model.paged_model import PagedModel

logger = logging.getLogger(__name__)

GIB = 2**30
_CONTEXT_STEP = 1024
"""A shortened context is a multiple of this, so that all replicas choose the same."""
_CUDA_CONTEXT_BYTES = GIB // 2
"""Estimated GPU memory of a process outside torch: CUDA's context and its libraries' kernels."""
# Host memory is shared with all other programs, so the pool uses all of it only if configured to.
_DEFAULT_CPU_KV_CACHE_GIB = 4.0


def size_kv_pool(
    model: PagedModel,
    kv_cache_gib: float | None,
    memory_fraction: float,
    gpu_share: float = 1.0,
    *,
    shortens: bool = False,
) -> int:
    """Return the number of KV blocks for the scheduler that fit into the free memory. Call it after
    running the largest step.

    kv_cache_gib: a cap; None means no cap on a GPU, 4 GiB on a CPU. memory_fraction: the fraction
    of the free memory that the pool may use; gpu_share: see `available_memory`. shortens: if the
    pool cannot hold one request of max_model_len tokens, lower the model's max_model_len, to a
    multiple of 1,024, rather than raise ConfigError.
    """
    left = available_memory(model.device, gpu_share) - model.mapped_bytes
    budget = pool_budget(left, model.device, memory_fraction, kv_cache_gib)
    num_blocks = fitting_blocks(budget, model.kv_bytes_per_block())
    context = fitting_context(num_blocks, model.block_size, model.max_model_len)
    if context < model.max_model_len:
        if not shortens or context == 0:
            raise _too_small(model, budget)
        logger.warning(
            "max_model_len: %d instead of the model's %d, as the KV pool may take %.2f GiB (engine.kv_cache_gib)",
            context, model.max_model_len, budget / GIB,
        )  # fmt: skip
        model.max_model_len = context
    return num_blocks


def pool_budget(left: int, device: torch.device, memory_fraction: float, kv_cache_gib: float | None = None) -> int:
    """Return the bytes that the KV pool may take if `left` bytes are free; see `size_kv_pool`."""
    if kv_cache_gib is None and device.type == "cpu":
        kv_cache_gib = _DEFAULT_CPU_KV_CACHE_GIB
    budget = int(left * memory_fraction)
    return budget if kv_cache_gib is None else min(budget, int(kv_cache_gib * GIB))


def fitting_blocks(budget: int, bytes_per_block: int) -> int:
    """Return the number of KV blocks for the scheduler. The runner keeps one for itself."""
    return budget // bytes_per_block - 1


def fitting_context(num_blocks: int, block_size: int, max_model_len: int) -> int:
    """Return the tokens of the longest request that the pool holds: max_model_len, or a multiple of
    1,024 below it. One block is the null block.
    """
    tokens = (num_blocks - 1) * block_size
    return max_model_len if tokens >= max_model_len else max(0, tokens // _CONTEXT_STEP * _CONTEXT_STEP)


def _too_small(model: PagedModel, budget: int) -> ConfigError:
    needed = -(-model.max_model_len // model.block_size) + 1  # plus the null block
    return ConfigError(
        f"kv_cache_gib: the KV pool may take {budget / GIB:.2f} GiB, but one request of max_model_len "
        f"{model.max_model_len} needs {needed * model.kv_bytes_per_block() / GIB:.2f} GiB; lower max_model_len, raise "
        f"kv_cache_gib or memory_fraction, or free memory on {model.device}"
    )


def available_memory(device: torch.device, gpu_share: float = 1.0) -> int:
    """Return the bytes that this process can still allocate on `device`.

    gpu_share: this process's fraction of a GPU shared by several processes. The result does not
    depend on how much the other processes have allocated so far, so they may start at the same
    time. On Linux CPUs: the kernel's MemAvailable, limited by the control groups.
    """
    if device.type == "cuda":
        # Memory cached by torch does not count as free: the largest step needs it again.
        free, total = torch.cuda.mem_get_info(device)
        if gpu_share >= 1:
            return int(free)
        return min(free, int(total * gpu_share) - torch.cuda.memory_reserved(device) - _CUDA_CONTEXT_BYTES)
    return min(_meminfo_available(Path("/proc/meminfo")), _cgroup_available(Path("/sys/fs/cgroup")))


def _meminfo_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"{meminfo} has no MemAvailable; set `engine.kv_cache_gib`")


_UNLIMITED = 1 << 62


def _cgroup_available(root: Path) -> int:
    """Return the bytes left under the memory limits of this process's control groups (version 2,
    then 1). A huge number if unlimited.
    """
    own = _own_cgroup()
    left = _UNLIMITED
    for base, limit_name, usage_name, reclaimable in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        group = base / own
        # A container often mounts its own group as the root, so the path from /proc may not exist
        # below it.
        for folder in [group, *group.parents] if group.is_dir() else [base]:
            if not folder.is_relative_to(base):
                break
            limit, usage = _read_number(folder / limit_name), _read_number(folder / usage_name)
            if limit is not None and usage is not None and limit < _UNLIMITED:
                # Page cache counts as usage, but the kernel frees it under pressure.
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
