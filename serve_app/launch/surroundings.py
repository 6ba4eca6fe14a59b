"""Checks the machine's limits before anything starts. Each failure is one line and exit status 2.

Ray would fail later and with tracebacks. Free memory and the space for packed weights are not
checked, because the need is known only when the model is loaded.
"""

import os
import resource
import secrets
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from serve_app.checkpoints.model_files import CACHE_DIR
from serve_app.environment import has_ray_token
from serve_app.errors import ConfigError

_MIN_FILES, _WANTED_FILES = 1024, 65_536
_MIN_PROCESSES = 1024
_PIDS = Path("/sys/fs/cgroup/pids.max")
_SHARED_MEMORY = Path("/dev/shm")
_MIN_FREE_BYTES = 256 * 2**20
"""Space for Ray's object store and logs."""
_SOCKET_NAME = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest path of Ray's sockets, below its folder for temporary files."""
_MAX_SOCKET_BYTES = 107


def check_surroundings(temporary: Path) -> None:
    """Raise `ConfigError` if a requirement is not met.

    `temporary`: Ray's folder for temporary files. Creates Ray's token.
    """
    _check_open_files()
    _check_processes()
    _check_temporary(temporary)
    _check_home()


def make_rays_token() -> None:
    """Create Ray's token, readable for this user only.

    With the token, any process may run code through Ray's ports. Ray would write it readable for
    every user. Raises `OSError` if it cannot be created.
    """
    token = Path.home() / ".ray" / "auth_token"
    if token.exists():
        with suppress(OSError):  # may belong to another user, on a read-only file system
            token.chmod(0o600)
        return
    token.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # another start has created it
        return
    try:
        with os.fdopen(file, "w") as new:
            new.write(secrets.token_hex(32))
    except OSError:
        token.unlink()
        raise


def _check_open_files() -> None:
    """Check the limit on open files. Raises the soft limit as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft != resource.RLIM_INFINITY and soft < _MIN_FILES:
        raise ConfigError(f"at most {soft} files may be open, but {_MIN_FILES} are needed: raise `ulimit -n`")


def _check_processes() -> None:
    limits = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # does not apply to root
        limits.append((soft, "raise `ulimit -u`"))
    with suppress(OSError, ValueError):  # `max`, or no such control group
        limits.append((int(_PIDS.read_text()), "raise the container's limit of processes"))
    for limit, advice in limits:
        if limit < _MIN_PROCESSES:
            raise ConfigError(f"at most {limit} threads may run, but {_MIN_PROCESSES} are needed: {advice}")


def _check_temporary(folder: Path) -> None:
    name = f"{folder}{_SOCKET_NAME}"
    if len(os.fsencode(name)) > _MAX_SOCKET_BYTES:
        most = _MAX_SOCKET_BYTES - len(_SOCKET_NAME)
        raise ConfigError(
            f"TMPDIR: {folder} is too long for the names of Ray's sockets (at most {most} bytes): set RAY_TMPDIR=/tmp"
        )
    for place in (folder, Path("/tmp")):
        _check_writable(place, "TMPDIR: ", "set TMPDIR to a folder that can be written")
    free = shutil.disk_usage(folder).free
    if free < _MIN_FREE_BYTES:
        needed = _MIN_FREE_BYTES // 2**20
        raise ConfigError(f"{folder}: {free // 2**20} MiB are free, but Ray needs {needed} MiB: free some space")
    if not _SHARED_MEMORY.is_dir():
        raise ConfigError(f"{_SHARED_MEMORY} is missing, but Ray needs it: mount a tmpfs there")


def _check_home() -> None:
    try:
        home, cache = Path.home(), CACHE_DIR.expanduser()
    except RuntimeError:
        raise ConfigError("this user has no home folder: set HOME to a folder that can be written") from None
    if not has_ray_token():
        try:
            make_rays_token()
        except OSError as error:
            raise ConfigError(
                f"HOME: Ray's token cannot be written to {home / '.ray'} ({error.strerror}): set HOME to a folder that "
                "can be written"
            ) from None
    _check_writable(
        cache, "HOME: ", "converted models are kept there; set HOME to a folder that can be written", make=True
    )


def _check_writable(folder: Path, key: str, advice: str, *, make: bool = False) -> None:
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".serve-app-") as probe:
            probe.write(b"x")
    except OSError as error:
        raise ConfigError(f"{key}{folder} cannot be written ({error.strerror}): {advice}") from None
