"""Disk cache for results that take long to compute. An entry is complete or does not exist.

Decides an entry's location, which of several processes makes it while the others wait, what happens
to damaged entries, and which entries are evicted. The caller decides the content and the key.
"""

import atexit
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from serve_app.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Key:
    """The inputs of an entry.

    source: a file or folder. choices: options of the conversion. exact: everything else that
    decides the content (the source's content, library versions, a digest of the code). Entries that
    differ only in `exact` replace each other.
    """

    source: Path
    choices: str
    exact: str

    @property
    def name(self) -> str:
        """The entry's name without suffix."""
        return f"{self.group}-{_digest(str(self))[:32]}"

    @property
    def group(self) -> str:
        """Common prefix of the names of entries that replace each other."""
        return _digest(f"{self.source} {self.choices}")[:16]


class DiskCache:
    """Entries of one kind, files or folders, in the folder `root/kind`. The folder is trusted."""

    def __init__(self, root: Path, kind: str, suffix: str = "", keep: int = 1) -> None:
        """keep: how many of the newest entries of a group are kept."""
        self._root, self._kind, self._suffix, self._keep = root.expanduser(), kind, suffix, keep

    def path(self, key: Key) -> Path:
        """Return the entry's path, whether or not it exists."""
        return self._root / self._kind / f"{key.name}{self._suffix}"

    def get(
        self,
        key: Key,
        make: Callable[[Path], object],
        read: Callable[[Path], T],
        on_wait: Callable[[], None] = lambda: None,
    ) -> T:
        """Return `read(path)` of the entry, after `make` has written it if it is missing.

        If `read` raises, the entry is damaged: this is logged, and it is made again. `on_wait` is
        called before waiting for another process that makes it. Raises OSError if the disk cannot
        be written, and the errors of `make`.
        """
        path = self.path(key)
        if path.exists():
            with suppress(Exception):  # checked again below, under the lock
                return read(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside the link's target folder, so that all who share the folder share its locks.
        locks = path.parent.resolve().parent / "locks"
        with only_process(locks / f"{self._kind}-{key.group}.lock", on_wait) as lock:
            lock.write_text(str(key.source))
            if path.exists():
                try:
                    return read(path)
                except Exception as error:  # any error on damaged content
                    logger.warning("%s is damaged and is recreated: %r", path, error)
                    _remove(path)
            self._write(path, key.group, make)
            self._evict(path, key.group, locks)
            return read(path)

    def get_or_temporary(self, key: Key, make: Callable[[Path], object], read: Callable[[Path], T]) -> T:
        """Like `get`; if the disk cannot be written, uses a temporary folder, removed at exit.

        Raises ConfigError if that cannot be written either.
        """
        try:
            return self.get(key, make, read)
        except OSError as error:
            logger.warning("cache_dir: cannot write %s: %s", self.path(key), error)
        try:
            return DiskCache(_temporary_root(), self._kind, self._suffix).get(key, make, read)
        except OSError as error:
            raise ConfigError(f"cache_dir: cannot write {self.path(key)}, nor a temporary file: {error}") from error

    def _write(self, path: Path, group: str, make: Callable[[Path], object]) -> None:
        # The lock's owner is the only writer of this group. Files left over are from killed
        # processes.
        prefix = f"tmp-{group}-"
        for left in path.parent.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix) as scratch:
            unfinished = Path(scratch) / path.name
            make(unfinished)
            _flush_to_disk(unfinished)
            unfinished.rename(path)

    def _evict(self, path: Path, group: str, locks: Path) -> None:
        """Remove the entries that `path` replaces, and those of sources that no longer exist.

        Processes that have a file mapped keep it.
        """
        others = [other for other in path.parent.glob(f"{group}-*") if other != path]
        for other in sorted(others, key=lambda other: other.lstat().st_mtime_ns, reverse=True)[self._keep - 1 :]:
            _remove(other)
        for lock in locks.glob(f"{self._kind}-*.lock"):
            with suppress(OSError, ValueError):
                if (source := lock.read_text()) and not Path(source).exists():
                    for other in path.parent.glob(f"{lock.stem.rpartition('-')[2]}-*"):
                        _remove(other)


@contextmanager
def only_process(lock: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Prevent other processes from entering a block with the same `lock` file, which is created.

    `on_wait` is called before waiting for another process. Raises OSError if the file cannot be
    written. The lock ends with its process.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield lock


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _flush_to_disk(path: Path) -> None:
    """Flush a file, or the files of a folder, before the entry gets its name.

    Otherwise a power failure could leave an empty file of that name, which later starts would
    consider complete.
    """
    for file in path.rglob("*") if path.is_dir() else (path,):
        if file.is_file():
            with file.open("rb") as content:
                os.fsync(content.fileno())


def _remove(path: Path) -> None:
    """Remove an entry atomically, so that no process reads a partial one.

    If that is impossible, it stays, and replacing it fails.
    """
    with suppress(OSError), tempfile.TemporaryDirectory(dir=path.parent, prefix="tmp-gone-") as scratch:
        path.rename(Path(scratch) / path.name)


@cache
def _temporary_root() -> Path:
    folder = tempfile.mkdtemp(prefix="serve-app-cache-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
