"""A replica's identity: everything that decides the tokens of its answers.

Known once the replica has loaded. Decides which replicas may continue each other's streams. Equal
settings are not enough: the files behind a name can change, and "auto" differs between machines.
"""

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from serve_app.system.code_digest import digest_code

_LIBRARIES = ("torch", "transformers", "triton", "llguidance")
_OF_THE_ENGINE = (
    *("dtype", "quantization", "kv_cache_dtype", "backend", "executor", "sampler", "build"),
    *("max_model_len", "eos_token_ids"),
)


def identify(info: Mapping[str, Any], *, weights: str, tokenizer: str, deterministic: bool) -> dict[str, Any]:
    """Return everything that decides which tokens a request gets.

    `info`: the fields of a loaded engine's `ModelInfo`.
    """
    return {
        "weights": weights,
        "tokenizer": tokenizer,
        **{name: info[name] for name in _OF_THE_ENGINE},
        "deterministic": deterministic,
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "code": digest_code(),
    }


def revision_of(identity: Mapping[str, Any]) -> str:
    """Hash `identity`. Replicas with equal revisions can continue each other's streams."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
