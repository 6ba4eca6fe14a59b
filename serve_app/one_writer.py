"""Files that several processes want: one of them makes each while the others wait, and it is whole or not there."""

import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)


@contextmanager
def only_writer(target: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Nobody else has this open for `target`, or for another file whose name begins alike up to its first `-`.

    Makes the folder; `on_wait` is called before waiting for another process. Raises OSError where that cannot be
    written. The lock ends with the process that holds it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f"{target.name.partition('-')[0]}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def flush_to_disk(path: Path) -> None:
    """A file, or the files of a folder, before it gets its name: if power failed soon after, there could be an empty
    file of that name, which every later start would take for the whole one. Raises OSError."""
    for file in path.iterdir() if path.is_dir() else (path,):
        with file.open("rb") as content:
            os.fsync(content.fileno())


def remove_damaged(folder: Path, error: Exception) -> None:
    """All of it at once, so that nobody takes what is left of it for a whole one. A disk that does not let it is no
    error yet: writing it again is."""
    logger.warning("%s is damaged and will be rebuilt: %r", folder, error)
    # Or another process was first.
    with suppress(OSError), tempfile.TemporaryDirectory(dir=folder.parent, prefix="tmp-") as scratch:
        folder.rename(Path(scratch) / folder.name)
