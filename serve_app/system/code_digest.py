"""Which code this is: what was made by other code may not fit."""

import hashlib
from functools import cache
from pathlib import Path

_CODE = (".py", ".c", ".h")


@cache
def digest_code(*names: str) -> str:
    """Of this package's sources, as they lie on disk; names: of these alone, as paths within the package."""
    folder = Path(__file__).parent.parent
    digest = hashlib.sha256()
    paths = [folder / name for name in names] or [path for path in folder.rglob("*") if path.suffix in _CODE]
    for path in sorted(paths):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
