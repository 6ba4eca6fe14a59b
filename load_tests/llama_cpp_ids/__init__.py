"""The token ids that llama.cpp makes of 1,000 lines, which tests compare ours with.

    python -m load_tests.llama_cpp_ids.make DEFAULT.gguf GEMMA.gguf tests/text/llama_cpp_ids.json.gz

writes them, in an environment with llama-cpp-python 0.3.36 (llama.cpp itself, built by pip) and
gguf.
"""

import zlib
from array import array
from collections.abc import Sequence


def checksum(token_ids: Sequence[int]) -> int:
    """24 bits are enough to notice a difference."""
    return zlib.crc32(array("I", token_ids).tobytes()) & 0xFFFFFF
