"""Identifies the code version, because cached results of other code may not fit."""

import hashlib
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
_CODE = (".py", ".c", ".h")


@cache
def digest_code(*names: str) -> str:
    """Return the digest of this package's sources on disk, or of only those in `names`."""
    return digest_sources(*(_PACKAGE / name for name in names or ("",)))


def digest_sources(*paths: Path) -> str:
    """Return the digest of the source files at and below `paths`.

    It does not depend on the folders above `paths`.
    """
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in _CODE:
                digest.update(f"{file.relative_to(path.parent)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
