"""How files store the matrices of experts, which transformers' modules stack in one parameter.

For the parameter `experts.gate_up_proj` there are four ways:
- `experts.gate_up_proj`: as in the module.
- `experts.gate_up_proj_blocks` and `_scales`: MXFP4, with outputs as rows in the module's order.
- `experts.gate_proj.weight` and `experts.up_proj.weight`: [experts, outputs, inputs]. The index of
  a GGUF file uses these names.
- `experts.N.gate_proj.weight` and `experts.N.up_proj.weight`: one matrix per expert.
Biases are stored in the first or in the third way.
"""

from collections.abc import Container, Iterable

import numpy as np
from numpy.typing import NDArray

BLOCKS, SCALES = "_blocks", "_scales"
_BIAS = "_bias"
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_GGUF_NAMES = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_GROUP = 32


def is_stack(name: str) -> bool:
    """Whether the module's parameter has one matrix or one bias per expert."""
    prefix, _, last = name.rpartition(".")
    return prefix.endswith(".experts") and last.removesuffix(_BIAS) in _PARTS


def tensors_of(name: str, count: int, known: Container[str]) -> list[str]:
    """Return the names of the tensors that hold a stack of `count` experts. Empty if some are
    missing.
    """
    prefix = name.rpartition(".")[0]
    ways = [[name], [name + BLOCKS, name + SCALES], [whole for _, whole in _parts_of(name)]]
    if not name.endswith(_BIAS):
        ways.append([f"{prefix}.{index}.{part}.weight" for index in range(count) for part, _ in _parts_of(name)])
    return next((way for way in ways if all(each in known for each in way)), [])


def gguf_names(parameters: Iterable[str]) -> dict[str, str]:
    """Map the names of a GGUF file's tensors of experts to those of the third way."""
    return {
        f"blk.{whole.partition('.layers.')[2].partition('.')[0]}.{_GGUF_NAMES[part]}.{whole.rpartition('.')[2]}": whole
        for name in parameters
        if is_stack(name)
        for part, whole in _parts_of(name)
    }


def gguf_blocks(numbers: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return MXFP4 blocks as GGUF has them, uint8 [groups * 17]. numbers: [groups * 16], two
    neighbours per byte; scales: [groups].
    """
    pairs = numbers.reshape(-1, _GROUP // 2)
    apart = np.empty((len(pairs), _GROUP), np.uint8)
    np.bitwise_and(pairs, 15, out=apart[:, ::2])
    np.right_shift(pairs, 4, out=apart[:, 1::2])
    blocks = np.empty((len(pairs), 1 + _GROUP // 2), np.uint8)
    blocks[:, 0] = scales
    blocks[:, 1:] = apart[:, : _GROUP // 2] | apart[:, _GROUP // 2 :] << 4
    return blocks.reshape(-1)


def _parts_of(name: str) -> list[tuple[str, str]]:
    """Return the parts of a stack, each with the tensor's name in the third way."""
    prefix, _, last = name.rpartition(".")
    ending = "bias" if last.endswith(_BIAS) else "weight"
    return [(part, f"{prefix}.{part}.{ending}") for part in _PARTS[last.removesuffix(_BIAS)]]
