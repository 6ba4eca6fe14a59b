"""Metrics of the ingress's background work: tasks, errors, keys file and ledger."""

import asyncio
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from serve_app.system.lasting import LastingTasks


def register_upkeep(
    registry: CollectorRegistry,
    loop: asyncio.AbstractEventLoop,
    tasks: LastingTasks,
    keys_file_invalid: Callable[[], bool],
    ledger_unusable: Callable[[], bool],
) -> None:
    """Register metrics that are read at scrape time, in any thread."""
    running = Gauge("serve_app_ingress_tasks", "Tasks of the ingress's event loop", registry=registry)
    running.set_function(lambda: len(asyncio.all_tasks(loop)))
    invalid = Gauge(
        "serve_app_keys_file_invalid",
        "1 while the keys file is invalid and the last valid keys are in force",
        registry=registry,
    )
    invalid.set_function(keys_file_invalid)
    unusable = Gauge(
        "serve_app_ledger_unusable",
        "1 while today's ledger cannot be used, and its sums are kept in memory",
        registry=registry,
    )
    unusable.set_function(ledger_unusable)
    registry.register(_Errors(tasks))


class _Errors(Collector):
    def __init__(self, tasks: LastingTasks) -> None:
        self._tasks = tasks

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the counter of task errors."""
        total = sum(self._tasks.errors.copy().values())
        yield CounterMetricFamily(
            "serve_app_task_errors", "Errors of the ingress's background tasks, which were restarted", value=total
        )
