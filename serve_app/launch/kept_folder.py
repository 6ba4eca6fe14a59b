"""Restores the launcher's files in the temporary folder if they are deleted.

Temporary folders are cleaned by age or by hand, but HAProxy reads the files whenever it starts,
which may be days later.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from serve_app.system.file_state import FileState, file_state

_UNFINISHED = ".new"
"""Suffix of a file that is about to replace another."""


class KeptFolder:
    """The files in a folder, without subfolders."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """`say` prints a line."""
        self._folder = folder
        self._say = say
        self._contents: dict[Path, tuple[FileState | None, bytes, int]] = {}

    def look(self) -> None:
        """Remember new files and restore deleted ones, for this user only. Raises `OSError`."""
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
            self._say(f"{len(gone)} of this server's files in {self._folder} were deleted and have been rewritten")
