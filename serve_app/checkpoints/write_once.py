"""Folders that several processes may want to write at one time: whole or not at all, and all of them succeed."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from serve_app.checkpoints.one_writer import flush_to_disk
from serve_app.errors import ConfigError


def write_once(target: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder that becomes `target`, unless another process was first.

    Raises ConfigError when the disk does not take it.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="tmp-") as scratch:
            folder = Path(scratch) / "model"
            folder.mkdir()
            write(folder)
            flush_to_disk(folder)
            try:
                folder.rename(target)
            except OSError:
                if not target.is_dir():
                    raise
    except OSError as error:
        raise ConfigError(f"cache_dir: cannot write {target}: {error}") from error
