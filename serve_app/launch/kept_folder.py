"""Keeps the launcher's files in the temporary folder: what cleans that by age or by hand deletes what is still needed.

HAProxy reads them whenever it starts, which may be days later.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from serve_app.system.file_state import FileState, file_state

_UNFINISHED = ".new"
"""The suffix of a file that is about to replace another."""


class KeptFolder:
    """The files in a folder, without those in folders below it."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """`say` prints a line."""
        self._folder = folder
        self._say = say
        self._contents: dict[Path, tuple[FileState | None, bytes, int]] = {}

    def look(self) -> None:
        """Remember what is new, and write again what has gone, for this user alone. Raises `OSError`."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for path in self._folder.iterdir():
            state = file_state(path)
            if path.is_file() and path.suffix != _UNFINISHED and self._contents.get(path, (None,))[0] != state:
                with suppress(OSError):
                    self._contents[path] = (state, path.read_bytes(), path.stat().st_mode & 0o777)
        gone = [path for path in self._contents if not path.exists()]
        for path in gone:
            state, content, mode = self._contents[path]
            new = path.with_name(path.name + _UNFINISHED)
            new.touch(mode)
            new.write_bytes(content)
            os.replace(new, path)
        if gone:
            self._say(f"{len(gone)} of this server's files in {self._folder} were deleted: written again")
