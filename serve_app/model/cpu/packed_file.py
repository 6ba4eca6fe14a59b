"""Packed weights on disk: packed once, then mapped by every process that runs them, all of which share the memory.

Decides where they are kept, for which weights, mode and build they hold, and what goes when others come. Where the disk
takes none, each process packs them into memory of its own. Linux maps files in huge pages by itself where the file
system has large folios (ext4 since 6.16, XFS for longer).
"""

import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from serve_app.model.cpu.ops import Format, PackedPart
from serve_app.model.options import Progress
from serve_app.one_writer import flush_to_disk, only_writer

logger = logging.getLogger(__name__)

Matrix = Sequence[PackedPart]
Job = Callable[[], Sequence[Matrix]]
"""Packs some matrices; run in any thread."""

_PACKING, _MAPPING = "loading weights", "mapping weights"
_ALIGNMENT = 4096
_AT_ONCE = 8 * 2**20
"""Bytes that a thread hands to the disk."""
_STRIDE = 256 * 2**20
"""How much is read in before progress is told."""
_MADV_POPULATE_READ = 22
"""Not among mmap's names in Python 3.11."""


@dataclass(frozen=True, slots=True)
class PackedFile:
    """Where to keep what is packed of `source`.

    Of files whose names begin alike, up to the `-`, which are of one source in one mode, one is kept.
    """

    path: Path
    source: Path

    @classmethod
    def of(cls, cache_dir: Path, identity: tuple[str, str], mode: str, library: str) -> "PackedFile":
        """identity: see `Parameters`; library: see `Kernels`."""
        same = hashlib.sha256(f"{identity[0]} {mode}".encode()).hexdigest()
        exact = hashlib.sha256(f"{identity} {mode} {library} {_code()}".encode()).hexdigest()
        return cls(cache_dir / "packed" / f"{same[:16]}-{exact[:32]}.weights", Path(identity[0]))


def pack_all(jobs: Sequence[Job], file: PackedFile | None, report: Progress) -> list[Sequence[Matrix]]:
    """What `jobs` pack, in as many threads as torch's operations have: mapped from `file`, which is written if need be;
    in memory without one, or where the disk does not take it."""
    if file is not None:
        try:
            if not _is_whole(file.path):
                with only_writer(file.path, lambda: report("waiting for another process to pack the weights", 0.0)):
                    if not _is_whole(file.path):
                        _write(file, jobs, report)
            return _map(file.path, report)
        except (OSError, ValueError) as error:
            logger.warning("packed weights stay in this process's memory: cannot write %s: %s", file.path, error)
    return _in_threads(lambda job: job(), jobs, report)


def _in_threads(run: Callable[[Job], Any], jobs: Sequence[Job], report: Progress) -> list[Any]:
    done = []
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for result in pool.map(run, jobs):
            done.append(result)
            report(_PACKING, len(done) / len(jobs))
    return done


def _write(target: PackedFile, jobs: Sequence[Job], report: Progress) -> None:
    # Whoever has the lock is the only writer of these: others of the same source and mode were killed.
    if target.path.exists():
        logger.warning("%s is damaged and will be rebuilt", target.path)
    prefix = f"tmp-{_source_and_mode(target.path)}-"
    for left in target.path.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.path.parent, prefix=prefix) as scratch:
        unfinished = Path(scratch) / target.path.name
        with _Writer(unfinished) as writer:
            # Each thread writes what it has packed and forgets it: all together may be more than fits into memory.
            index = _in_threads(lambda job: [[writer.add(part) for part in matrix] for matrix in job()], jobs, report)
        text = json.dumps({"source": str(target.source), "index": index}).encode()
        with unfinished.open("ab") as file:
            file.write(text + len(text).to_bytes(8, "little"))
        flush_to_disk(unfinished)
        unfinished.rename(target.path)
    _remove_others(target.path)


def _remove_others(path: Path) -> None:
    """What `path` replaces, and what is left of models that are gone. Who has it mapped keeps it."""
    for other in path.parent.glob("*.weights"):
        replaced = other != path and _source_and_mode(other) == _source_and_mode(path)
        with suppress(OSError, ValueError, KeyError, TypeError):  # removed by another process, or no such file
            if replaced or not Path(_trailer(other)["source"]).exists():
                other.unlink(missing_ok=True)


def _is_whole(path: Path) -> bool:
    """Whether it is there, with an index."""
    try:
        return "index" in _trailer(path)
    except (OSError, ValueError, TypeError):
        return False


def _source_and_mode(path: Path) -> str:
    return path.name.partition("-")[0]


def _trailer(path: Path) -> dict[str, Any]:
    """What stands behind the weights. Raises OSError or ValueError for what is no such file."""
    with path.open("rb") as file:
        file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(), "little")
        if length > file.tell():
            raise ValueError("it does not end with an index")
        file.seek(-8 - length, os.SEEK_END)
        return dict(json.loads(file.read(length)))


class _Writer:
    """Puts parts into a new file, one behind the other, from several threads; past the system's cache, where the file
    system can. Copying into the cache took longer than packing, and what threads put there in the order in which they
    finish is not in huge pages."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwrite(self._descriptor, mmap.mmap(-1, _ALIGNMENT), 0)
        except OSError:  # it cannot, or not in blocks of this size
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
        self._end = 0
        self._lock = threading.Lock()
        self._buffer = _PageBuffer()

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def add(self, part: PackedPart) -> tuple[Any, ...]:
        """The part's entry in the index."""
        size = part.data.nbytes
        with self._lock:
            offset = self._end
            self._end += _aligned(size)
        for first in range(0, size, _AT_ONCE):
            self._write(part.data[first : first + _AT_ONCE], offset + first)
        return offset, size, part.format, part.outputs, part.inputs, part.exact

    def _write(self, data: npt.NDArray[np.uint8], offset: int) -> None:
        """Data of at most `_AT_ONCE` bytes, in whole pages."""
        buffer = self._buffer.content
        buffer[: data.size] = data
        left = buffer[: _aligned(data.size)].data
        end = offset + len(left)
        while left:
            left = left[os.pwrite(self._descriptor, left, end - len(left)) :]


class _PageBuffer(threading.local):
    """Each thread's own memory that begins at a page, as writes past the system's cache must."""

    def __init__(self) -> None:
        self.content = np.frombuffer(mmap.mmap(-1, _AT_ONCE), np.uint8)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _map(path: Path, report: Progress) -> list[Sequence[Matrix]]:
    """Raises OSError or ValueError for what is no such file."""
    index = _trailer(path)["index"]
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    content = np.frombuffer(memory, np.uint8)
    _read_in(memory, report)

    def part(entry: Sequence[Any]) -> PackedPart:
        offset, size, format, outputs, inputs, exact = entry
        return PackedPart(content[offset : offset + size], Format(format), outputs, inputs, exact)

    return [[[part(entry) for entry in matrix] for matrix in job] for job in index]


def _read_in(memory: mmap.mmap, report: Progress) -> None:
    """From the disk, if need be, so that it is seen; the first step would wait for it otherwise."""
    with suppress(OSError):  # a system that does not know these does without
        memory.madvise(mmap.MADV_HUGEPAGE)
        for first in range(0, len(memory), _STRIDE):
            memory.madvise(_MADV_POPULATE_READ, first, min(_STRIDE, len(memory) - first))
            report(_MAPPING, min(1.0, (first + _STRIDE) / len(memory)))


@cache
def _code() -> str:
    """Of the sources that decide what is packed, and how."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.py"), *folder.parent.glob("*.py")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
