"""Detects changes of a watched file. Standard library only, so that every package may import it."""

from pathlib import Path

FileState = tuple[int, int, int, int]


def file_state(path: Path) -> FileState | None:
    """Return a state that changes when the file is written or replaced, or its mode changes.

    Also detects changes through a symbolic link. None if the file cannot be found.
    """
    try:
        found = path.stat()
    except (OSError, ValueError):  # the path has a NUL byte
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
