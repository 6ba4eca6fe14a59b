"""Keeps what each test took in `build/durations.json`: elapsed seconds, and processor seconds with
those of children.

A session's fixtures count for the first test that uses them, and children once they have ended.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest

_FILE = Path(__file__).parents[1] / "build" / "durations.json"


class Durations:
    """A pytest plugin. With pytest-xdist its workers measure and its controller writes."""

    def __init__(self, config: pytest.Config) -> None:
        self._is_worker = hasattr(config, "workerinput")
        self._began: dict[str, float] = {}
        self._found: dict[str, list[float]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """The processor seconds since the test's start, with its last report."""
        report = yield
        if call.when == "teardown":
            report.user_properties.append(("processor_s", _processor_s() - self._began.pop(item.nodeid)))
        return report

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """The test starts."""
        self._began[nodeid] = _processor_s()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a test."""
        seconds = self._found.setdefault(report.nodeid, [0.0, 0.0])
        seconds[0] += report.duration
        if report.when == "teardown":
            seconds[1] = dict(report.user_properties)["processor_s"]

    def pytest_sessionfinish(self) -> None:
        """Write them over those of earlier runs."""
        if self._is_worker or not self._found:
            return
        _FILE.parent.mkdir(exist_ok=True)
        known = json.loads(_FILE.read_text()) if _FILE.exists() else {}
        new = {test: {"seconds": round(a, 2), "processor_s": round(b, 2)} for test, (a, b) in self._found.items()}
        _FILE.write_text(json.dumps({**known, **new}, indent=1))


def _processor_s() -> float:
    return sum(os.times()[:4])
