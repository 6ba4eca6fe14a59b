"""Packed weights on disk: packed once, then mapped by all processes that run them, which share the
memory.

Decides which weights, mode and build a file is valid for. If the disk cannot hold the file, each
process packs the weights into its own memory. Linux maps files in huge pages automatically if the
file system has large folios (ext4 since 6.16, XFS earlier).
"""

import fcntl
import json
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from serve_app.checkpoints.disk_cache import DiskCache, Key
from serve_app.model.cpu.ops import Format, PackedPart
from serve_app.model.options import Progress
from serve_app.system.code_digest import digest_code

logger = logging.getLogger(__name__)

Matrix = Sequence[PackedPart]
Job = Callable[[], Sequence[Matrix]]
"""Packs some matrices. May run in any thread."""

_PACKING, _MAPPING = "loading weights", "mapping weights"
_ALIGNMENT = 4096
_AT_ONCE = 8 * 2**20
"""Bytes that a thread writes to the disk at once."""
_STRIDE = 256 * 2**20
"""Bytes that are read between two progress reports."""
_MADV_POPULATE_READ = 22
"""Not defined in Python 3.11's mmap module."""


def pack_all(
    jobs: Sequence[Job], cache_dir: Path | None, identity: tuple[str, str], mode: str, library: str, report: Progress
) -> list[Sequence[Matrix]]:
    """Return the matrices that `jobs` pack, using as many threads as torch.

    They are mapped from a file in `cache_dir`, which is written if missing. Without `cache_dir`, or
    if the file cannot be written, they are packed into memory.

    identity: see `Parameters`; library: see `Kernels`.
    """
    if cache_dir is not None:
        kept = DiskCache(cache_dir, "packed", ".weights")
        key = Key(Path(identity[0]), mode, f"{identity[1]} {library} {digest_code('model')}")
        try:
            return kept.get(
                key,
                lambda path: _write(path, jobs, report),
                lambda path: _map(path, report),
                lambda: report("waiting for another process to pack the weights", 0.0),
            )
        except OSError as error:
            logger.warning("packed weights stay in this process's memory: cannot write %s: %s", kept.path(key), error)
    return _in_threads(lambda job: job(), jobs, report)


def _in_threads(run: Callable[[Job], Any], jobs: Sequence[Job], report: Progress) -> list[Any]:
    done = []
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for result in pool.map(run, jobs):
            done.append(result)
            report(_PACKING, len(done) / len(jobs))
    return done


def _write(target: Path, jobs: Sequence[Job], report: Progress) -> None:
    with _Writer(target) as writer:
        # Each thread writes its packed part and frees it: all parts together may not fit into
        # memory.
        index = _in_threads(lambda job: [[writer.add(part) for part in matrix] for matrix in job()], jobs, report)
    text = json.dumps(index).encode()
    with target.open("ab") as file:
        file.write(text + len(text).to_bytes(8, "little"))


def _index(path: Path) -> list[Any]:
    """Read the index behind the weights. Raises OSError or ValueError for any other file."""
    with path.open("rb") as file:
        file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(), "little")
        if length > file.tell():
            raise ValueError("it does not end with an index")
        file.seek(-8 - length, os.SEEK_END)
        return list(json.loads(file.read(length)))


class _Writer:
    """Appends parts to a new file from several threads, bypassing the page cache if the file system
    supports it.

    Copying into the page cache took longer than packing. Pages that threads put there in the order
    in which they finish are not huge pages.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwrite(self._descriptor, mmap.mmap(-1, _ALIGNMENT), 0)
        except OSError:  # not supported, or not in blocks of this size
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
        self._end = 0
        self._lock = threading.Lock()
        self._buffer = _PageBuffer()

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def add(self, part: PackedPart) -> tuple[Any, ...]:
        """Write the part and return its index entry."""
        size = part.data.nbytes
        with self._lock:
            offset = self._end
            self._end += _aligned(size)
        for first in range(0, size, _AT_ONCE):
            self._write(part.data[first : first + _AT_ONCE], offset + first)
        return offset, size, part.format, part.outputs, part.inputs, part.exact

    def _write(self, data: npt.NDArray[np.uint8], offset: int) -> None:
        """Write data of at most `_AT_ONCE` bytes, in whole pages."""
        buffer = self._buffer.content
        buffer[: data.size] = data
        left = buffer[: _aligned(data.size)].data
        end = offset + len(left)
        while left:
            left = left[os.pwrite(self._descriptor, left, end - len(left)) :]


class _PageBuffer(threading.local):
    """A page-aligned buffer per thread, as writes that bypass the page cache require."""

    def __init__(self) -> None:
        self.content = np.frombuffer(mmap.mmap(-1, _AT_ONCE), np.uint8)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _map(path: Path, report: Progress) -> list[Sequence[Matrix]]:
    """Map the file. Raises any exception for a damaged file."""
    index = _index(path)
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    content = np.frombuffer(memory, np.uint8)
    _read_in(memory, report)

    def part(entry: Sequence[Any]) -> PackedPart:
        offset, size, format, outputs, inputs, exact = entry
        return PackedPart(content[offset : offset + size], Format(format), outputs, inputs, exact)

    return [[[part(entry) for entry in matrix] for matrix in job] for job in index]


def _read_in(memory: mmap.mmap, report: Progress) -> None:
    """Read the file from the disk if necessary, and report the progress. Otherwise the first step
    would wait for it.
    """
    with suppress(OSError):  # these are optional: older systems do not support them
        memory.madvise(mmap.MADV_HUGEPAGE)
        for first in range(0, len(memory), _STRIDE):
            memory.madvise(_MADV_POPULATE_READ, first, min(_STRIDE, len(memory) - first))
            report(_MAPPING, min(1.0, (first + _STRIDE) / len(memory)))
