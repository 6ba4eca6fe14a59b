"""Tells whether a watched file has changed. Standard library only, so that every room may import it."""

from pathlib import Path

FileState = tuple[int, int, int]


def file_state(path: Path) -> FileState | None:
    """Differs whenever the file has been written or replaced, also by a symbolic link's turning elsewhere.

    None while it cannot be found.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
