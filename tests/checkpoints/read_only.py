"""A folder on a disk that is mounted read-only; the tests may run as root, whom modes do not
stop."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def refuse_writes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As a disk does that is mounted read-only, in `folder` alone."""
    for name in ("mkdir", "rename", "unlink"):
        done: Callable[..., Any] = getattr(os, name)

        def refuse(path: Any, *rest: Any, done: Callable[..., Any] = done, **fields: Any) -> Any:
            if Path(path).is_relative_to(folder):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
            return done(path, *rest, **fields)

        monkeypatch.setattr(os, name, refuse)
