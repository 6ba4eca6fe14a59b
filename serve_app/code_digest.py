"""Which code this is: what was made by other code may not fit."""

import hashlib
from functools import cache
from pathlib import Path

_CODE = (".py", ".c", ".h")


@cache
def digest_code() -> str:
    """Of this package's sources, as they lie on disk."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _CODE):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
