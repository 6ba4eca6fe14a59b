"""Utilization and memory of a replica's GPUs, read from NVML at scrape time.

Values that NVML does not provide have no series (utilization under MIG; everything without NVML).
Other values are not affected.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric


class GpuState:
    """A collector for a `CollectorRegistry`."""

    def __init__(self, gpu_ids: Sequence[int | str]) -> None:
        """`gpu_ids`: NVML indices or UUIDs."""
        import pynvml

        self._nvml = pynvml
        self._gpu_ids = gpu_ids
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()

    def _handle(self, gpu: int | str) -> Any:
        if isinstance(gpu, str) and not gpu.isdigit():
            return self._nvml.nvmlDeviceGetHandleByUUID(gpu)
        return self._nvml.nvmlDeviceGetHandleByIndex(int(gpu))

    def collect(self) -> Iterable[Metric]:
        """Return NVML's current values."""
        nvml = self._nvml
        utilization = GaugeMetricFamily(
            "serve_app_gpu_utilization_ratio", "Fraction of time that the GPU was busy", labels=["gpu"]
        )
        used = GaugeMetricFamily("serve_app_gpu_memory_used_bytes", "GPU memory in use", labels=["gpu"])
        total = GaugeMetricFamily("serve_app_gpu_memory_total_bytes", "GPU memory", labels=["gpu"])
        for gpu in self._gpu_ids:
            name = [str(gpu)]
            with suppress(nvml.NVMLError):
                utilization.add_metric(name, nvml.nvmlDeviceGetUtilizationRates(self._handle(gpu)).gpu / 100)
            with suppress(nvml.NVMLError):
                memory = nvml.nvmlDeviceGetMemoryInfo(self._handle(gpu))
                used.add_metric(name, float(memory.used))
                total.add_metric(name, float(memory.total))
        return utilization, used, total
