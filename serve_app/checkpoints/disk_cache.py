"""What takes long to make, kept on disk from one start to the next. Whole, or not there.

Decides where it is, that one of several processes makes it while the others wait, what happens to a damaged one, and
which ones go when others come. What it holds, and what that depends on, is for whoever makes it.
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
    """What an entry is made of: a file or folder, the choices that were made beside it, and all else that decides what
    the entry holds (the source's content, versions of libraries, a digest of the code). Entries that differ in `exact`
    alone replace each other."""

    source: Path
    choices: str
    exact: str

    @property
    def name(self) -> str:
        """The entry's, without its suffix."""
        return f"{self.group}-{_digest(str(self))[:32]}"

    @property
    def group(self) -> str:
        """What the names of entries that replace each other begin with."""
        return _digest(f"{self.source} {self.choices}")[:16]


class DiskCache:
    """The entries of one kind, files or folders, in the folder `root/kind`. The folder is trusted."""

    def __init__(self, root: Path, kind: str, suffix: str = "", keep: int = 1) -> None:
        """keep: how many entries of a group stay, the newest ones."""
        self._root, self._kind, self._suffix, self._keep = root.expanduser(), kind, suffix, keep

    def path(self, key: Key) -> Path:
        """Where the entry is, or would be."""
        return self._root / self._kind / f"{key.name}{self._suffix}"

    def get(
        self,
        key: Key,
        make: Callable[[Path], object],
        read: Callable[[Path], T],
        on_wait: Callable[[], None] = lambda: None,
    ) -> T:
        """What `read` returns for the entry's path, after `make` has written it there if need be.

        An entry for which `read` raises is damaged: that is logged, and it is made again. `on_wait` is called before
        waiting for another process that makes it. Raises OSError where the disk takes nothing, and what `make` raises.
        """
        path = self.path(key)
        if path.exists():
            with suppress(Exception):  # looked at again by the one process that may replace it
                return read(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside the folder that a link leads to, so that those who share it share its locks.
        locks = path.parent.resolve().parent / "locks"
        with only_process(locks / f"{self._kind}-{key.group}.lock", on_wait) as lock:
            lock.write_text(str(key.source))
            if path.exists():
                try:
                    return read(path)
                except Exception as error:  # whatever its bytes provoke
                    logger.warning("%s is damaged, and made again: %r", path, error)
                    _remove(path)
            self._write(path, key.group, make)
            self._evict(path, key.group, locks)
            return read(path)

    def get_or_temporary(self, key: Key, make: Callable[[Path], object], read: Callable[[Path], T]) -> T:
        """As `get`; where the disk takes nothing, in a temporary folder that goes with this process.

        Raises ConfigError where that cannot be written either.
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
        # Whoever has the lock is the only writer of this group: others were killed.
        prefix = f"tmp-{group}-"
        for left in path.parent.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix) as scratch:
            unfinished = Path(scratch) / path.name
            make(unfinished)
            _flush_to_disk(unfinished)
            unfinished.rename(path)

    def _evict(self, path: Path, group: str, locks: Path) -> None:
        """What `path` replaces, and what is left of sources that are gone. Who has a file mapped keeps it."""
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
    """No other process is in a block like this one for the same file, which is made.

    `on_wait` is called before waiting for another process. Raises OSError where the file cannot be written. The lock
    ends with the process that holds it.
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
    """A file, or the files of a folder, before it gets its name: if power failed soon after, there could be an empty
    file of that name, which every later start would take for the whole one."""
    for file in path.rglob("*") if path.is_dir() else (path,):
        if file.is_file():
            with file.open("rb") as content:
                os.fsync(content.fileno())


def _remove(path: Path) -> None:
    """All of it at once, so that nobody takes what is left of it for a whole one. Where that is not possible it stays:
    writing another one in its place fails."""
    with suppress(OSError), tempfile.TemporaryDirectory(dir=path.parent, prefix="tmp-gone-") as scratch:
        path.rename(Path(scratch) / path.name)


@cache
def _temporary_root() -> Path:
    folder = tempfile.mkdtemp(prefix="serve-app-cache-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
