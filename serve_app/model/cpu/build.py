"""Compiles the C kernels at first use and keeps the library.

Decides which builds this machine can run, and where libraries are kept. There is one file per
source, compiler and build, so machines may share the folder, and it survives upgrades. Does not
decide what runs without kernels.
"""

import ctypes
import hashlib
import logging
import os
import re
import shutil
import subprocess
from pathlib import Path

from serve_app.checkpoints.disk_cache import DiskCache, Key
from serve_app.errors import one_line
from serve_app.system.code_digest import digest_sources

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "kernels"

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", *_AVX2)

_AVX512BF16 = (*_AVX512, "avx512bf16")

BUILDS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512BF16, "amx-tile", "amx-bf16", "amx-int8"),
    "avx512bf16": _AVX512BF16,
    "avx512": _AVX512,
    "avxvnni": (*_AVX2, "avxvnni"),
    "avx2": _AVX2,
    "portable": (),
}
"""The instruction sets that each build uses, in the compiler's names. Fastest build first."""

_FLAGS = (
    *("-std=gnu11", "-O3", "-ffp-contract=off", "-fwrapv", "-fno-math-errno", "-Wno-psabi"),
    *("-fPIC", "-shared", "-pthread"),
)
_COMPILE_TIMEOUT_S = 120.0
_KEPT = 8
"""Libraries kept per build: machines with different compilers may share the folder."""


class KernelsUnavailableError(Exception):
    """The kernels cannot be used here. The message is the reason, in one line."""


def usable_builds(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return the builds that this machine can run, fastest first."""
    known = _instruction_sets(cpuinfo)
    return [build for build, needed in BUILDS.items() if known.issuperset(needed)]


def missing_for_faster(build: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, list[str]]:
    """Return, for each build faster than `build`, the instruction sets that this machine lacks."""
    faster, known = list(BUILDS)[: list(BUILDS).index(build)], _instruction_sets(cpuinfo)
    return {name: [needed for needed in BUILDS[name] if needed not in known] for name in faster}


def _instruction_sets(cpuinfo: Path) -> set[str]:
    """Return this machine's instruction sets in the compiler's names. Linux writes avx512_vnni and
    amx_tile where the compiler writes avx512vnni and amx-tile.
    """
    try:
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")]
    except OSError:
        lines = []
    names = re.sub(r"\b(avx|avx512)_", r"\1", lines[0]).replace("amx_", "amx-") if lines else ""
    return set(names.split())


def find_compiler() -> str | None:
    """Return the path of this machine's C compiler, or None."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def load_library(build: str, cache_dir: Path) -> tuple[ctypes.CDLL, str]:
    """Load the kernels, compiled if necessary. Returns their fingerprint too: equal fingerprints
    compute equal numbers, wherever the package is installed. Raises KernelsUnavailableError.
    """
    path, fingerprint = compiled(build, cache_dir)
    try:
        return ctypes.CDLL(str(path)), fingerprint
    except OSError as error:
        raise KernelsUnavailableError(one_line(error)) from error


def compiled(build: str, cache_dir: Path) -> tuple[Path, str]:
    """Return the library in `cache_dir`, and its fingerprint.

    The first process compiles it; concurrent processes wait. Raises KernelsUnavailableError if
    there is no compiler, it fails, or the folder is not writable.
    """
    compiler = find_compiler()
    if compiler is None:
        raise KernelsUnavailableError("there is no C compiler (cc, gcc or clang)")
    flags = [*_FLAGS, *(f"-m{name}" for name in BUILDS[build])]
    try:
        fingerprint = _fingerprint(build, compiler, flags)
        kept = DiskCache(cache_dir, "kernels", ".so", keep=_KEPT)
        key = Key(SOURCES, build, fingerprint)
        path = kept.get(key, lambda path: _compile(build, [compiler, *flags], path), lambda path: path)
    except OSError as error:
        raise KernelsUnavailableError(one_line(error)) from error
    return path, fingerprint


def _fingerprint(build: str, compiler: str, flags: list[str]) -> str:
    # Path, size and date identify the compiler's version: asking for it would start a process.
    status = os.stat(compiler)
    made_of = f"{os.path.realpath(compiler)} {status.st_size} {status.st_mtime_ns} {flags} {digest_sources(SOURCES)}"
    return f"{build}-{hashlib.sha256(made_of.encode()).hexdigest()[:24]}"


def _compile(build: str, command: list[str], target: Path) -> None:
    full = [*command, str(SOURCES / "kernels.c"), "-o", str(target), "-lm"]
    try:
        result = subprocess.run(full, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise KernelsUnavailableError(f"{command[0]} did not finish in {_COMPILE_TIMEOUT_S:.0f} s") from None
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line] or [f"status {result.returncode}"]
        raise KernelsUnavailableError(f"{command[0]} failed: {errors[0]}")
    logger.info("compiled the CPU kernels (build %s)", build)
