"""The conditions of a measurement: machine, the server's CPU time and memory, and other load."""

import os
import platform
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]


def machine() -> dict[str, Any]:
    """Return the machine, its load and the software versions."""
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": model.partition(":")[2].strip() or platform.processor(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "ray")},
    }


@dataclass(frozen=True, slots=True)
class TreeUsage:
    """Usage of a process and all its descendants.

    CPU seconds so far, proportional set size in MiB, number of processes.
    """

    cpu_s: float
    pss_mib: float
    processes: int


def tree_usage(pid: int) -> TreeUsage:
    """Return the usage of the process tree under `pid`; skips processes that end meanwhile.

    Raises `psutil.NoSuchProcess` if `pid` itself has ended.
    """
    root = psutil.Process(pid)
    cpu_s = pss = 0.0
    processes = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
            pss += process.memory_full_info().pss / 2**20
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        cpu_s += times.user + times.system
        processes += 1
    return TreeUsage(cpu_s, pss, processes)


def busy_cpu_s() -> float:
    """Return the CPU seconds used by the whole machine since boot, over all cores."""
    times = psutil.cpu_times()
    return float(
        sum(times) - times.idle - times.iowait - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    )


def wait_until_quiet(limit_s: float, server_pid: int | None = None, cores: float = 0.2) -> float:
    """Wait until processes other than the server use less than `cores`, at most about `limit_s`.

    Returns the seconds waited.
    """

    def foreign() -> float:
        return busy_cpu_s() - (tree_usage(server_pid).cpu_s if server_pid is not None else 0.0)

    start = time.monotonic()
    while time.monotonic() - start < limit_s:
        before = foreign()
        time.sleep(1.0)
        if foreign() - before < cores:
            break
    return time.monotonic() - start


class Meter:
    """Measures one interval: the server's usage, and other processes' (`foreign_cores`).

    `foreign_cores` excludes the server and this process. Without a server's pid, this process does
    all the work itself; the pid may also be this process's own.
    """

    def __init__(self, server_pid: int | None) -> None:
        self._pid = server_pid
        self._start = time.perf_counter()
        self._busy, self._own = busy_cpu_s(), time.process_time()
        self._server = tree_usage(server_pid).cpu_s if server_pid is not None else 0.0

    def read(self) -> dict[str, float]:
        """Return the figures since construction.

        The server's are included only if its pid was given.
        """
        wall = time.perf_counter() - self._start
        usage = tree_usage(self._pid) if self._pid is not None else None
        server = usage.cpu_s - self._server if usage is not None else 0.0
        own = time.process_time() - self._own if self._pid != os.getpid() else 0.0
        figures = {"foreign_cores": round((busy_cpu_s() - self._busy - server - own) / wall, 3)}
        if usage is None:
            return figures
        return figures | {
            "server_cores": round(server / wall, 2),
            "server_cpu_s": round(server, 2),
            "server_pss_mib": round(usage.pss_mib),
            "server_processes": usage.processes,
        }
