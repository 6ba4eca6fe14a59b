"""What loading a model needs at its peak, against the memory that it keeps."""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from load_tests.gpu.checks import Result
from load_tests.gpu.steps import random_module
from serve_app.model.loader import load_model
from serve_app.model.options import ModelOptions

PEAK_LIMIT = 1.1
"""Peak at load over the memory that is kept."""


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of all tensors that torch's operations have taken or made and that are still
    held, on a device without a counter of its own. Tensors without values do not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
        self.peak = max(self.peak, self.held())
        return out

    def held(self) -> int:
        """Return the bytes that are held now."""
        self._live = {key: kept for key, kept in self._live.items() if not kept[0].expired()}  # type: ignore[no-untyped-call]
        return sum(size for _, size in self._live.values())


class Peak:
    """A context: the bytes held on a device at most, and at the end, above those at its start."""

    def __init__(self, device: torch.device) -> None:
        self.most = self.kept = 0
        self._device = device
        self._storages = LiveStorages()

    def __enter__(self) -> Self:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            self._before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._storages.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.collect()
        if self._device.type == "cuda":
            self.kept = torch.cuda.memory_allocated(self._device) - self._before
            self.most = torch.cuda.max_memory_allocated(self._device) - self._before
        else:
            self._storages.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
            self.kept, self.most = self._storages.held(), self._storages.peak


def fit(config: dict[str, Any], device: torch.device, dtype: torch.dtype, quantization: str) -> Result:
    """Load a random model of this shape from a folder, on the Triton decoder."""
    with TemporaryDirectory() as folder:
        random_module(config, device, dtype).save_pretrained(folder, max_shard_size="4GB")
        options = ModelOptions(
            model=folder,
            device=device.type,
            dtype=str(dtype).removeprefix("torch."),
            attention_backend="triton",
            quantization=quantization,
            cache_dir=str(Path(folder, "cache")),
        )
        with Peak(device) as peak:
            model = load_model(options)
    ratio = peak.most / peak.kept
    executor = type(model.executor).__name__
    return {
        # Of a tiny model, the check at load needs more than the weights.
        "passed": executor == "GpuDecoder" and (ratio <= PEAK_LIMIT or device.type == "cpu"),
        "executor": executor,
        "kept_gib": peak.kept / 2**30,
        "peak_gib": peak.most / 2**30,
        "ratio": round(ratio, 3),
    }
