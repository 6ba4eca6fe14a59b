"""The checks of one stage. Each prints one line of JSON after `CHECK ` when it ends."""

import json
import time
from collections.abc import Callable
from typing import Any

CHECK_PREFIX = "CHECK "
"""Prefix of the lines that report a stage's checks."""

Result = dict[str, Any]
"""{"passed": bool, perhaps "ratio" or "skipped", figures by name}."""


class Checks:
    """Runs checks. A check that fails or raises does not stop the others, unless the device is
    lost."""

    def __init__(self) -> None:
        self.all_passed = True

    def check(self, name: str, limit: str, run: Callable[[], Result]) -> None:
        """Run one check and report its result."""
        begin = time.perf_counter()
        lost = False
        try:
            result = {"name": name, "limit": limit, **run()}
        except Exception as error:  # a check must not take the others with it
            lost = not self.lives()
            text = f"{type(error).__name__}: {error}"[:2000] + (" (the device is lost)" if lost else "")
            result = {"name": name, "limit": limit, "passed": False, "error": text}
        result["took_s"] = round(time.perf_counter() - begin, 1)
        self.all_passed &= result["passed"]
        print("\n" + CHECK_PREFIX + json.dumps(result), flush=True)
        if lost:
            raise SystemExit(1)

    def lives(self) -> bool:
        """Whether this process can run further checks."""
        return True


def skipped(reason: str) -> Result:
    """Return the result of a check that cannot run here."""
    return {"passed": True, "skipped": reason}
