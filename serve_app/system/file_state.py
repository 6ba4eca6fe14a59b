"""Tells whether a watched file has changed. Standard library only, so that every room may import it."""

from pathlib import Path

FileState = tuple[int, int, int, int]


def file_state(path: Path) -> FileState | None:
    """Differs whenever the file has been written or replaced, also through a symbolic link, or its mode has changed.

    None while it cannot be found.
    """
    try:
        found = path.stat()
    except (OSError, ValueError):  # of a path with a NUL byte
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
