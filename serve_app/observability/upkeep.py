"""What the ingress does beside requests: its tasks, their errors, and whether its keys file can be read."""

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
) -> None:
    """Metrics that are read when somebody scrapes, in any thread."""
    running = Gauge("serve_app_ingress_tasks", "Tasks of the ingress's event loop", registry=registry)
    running.set_function(lambda: len(asyncio.all_tasks(loop)))
    invalid = Gauge(
        "serve_app_keys_file_invalid", "1 while the keys file cannot be read, and older keys hold", registry=registry
    )
    invalid.set_function(keys_file_invalid)
    registry.register(_Errors(tasks))


class _Errors(Collector):
    def __init__(self, tasks: LastingTasks) -> None:
        self._tasks = tasks

    def collect(self) -> Iterator[CounterMetricFamily]:
        """One counter."""
        total = sum(self._tasks.errors.copy().values())
        yield CounterMetricFamily(
            "serve_app_task_errors", "Errors of the ingress's lasting tasks, which ran again", value=total
        )
