"""Which code this is: what was made by other code may not fit."""

import hashlib
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
_CODE = (".py", ".c", ".h")


@cache
def digest_code(*names: str) -> str:
    """Of this package's sources, as they lie on disk; names: of these files and folders alone."""
    return digest_sources(*(_PACKAGE / name for name in names or ("",)))


def digest_sources(*paths: Path) -> str:
    """Of the source files at `paths` and below them, whichever folder these are in."""
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in _CODE:
                digest.update(f"{file.relative_to(path.parent)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
