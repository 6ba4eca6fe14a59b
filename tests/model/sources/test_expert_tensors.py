"""Mixtures of experts straight from their files: every way in which files store them, against
transformers' modules."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from torch import Tensor

from serve_app.errors import ConfigError
from serve_app.model.cpu.build import usable_builds
from serve_app.model.executor import UnsupportedModelError
from serve_app.model.loader import load_model
from serve_app.model.options import ModelOptions
from serve_app.model.paged_model import PagedModel
from serve_app.model.sources.expert_tensors import gguf_blocks
from serve_app.model.sources.safetensors_files import check_complete, open_safetensors
from serve_app.model.sources.skeleton import empty_module
from tests import gguf_models
from tests.mixtures import KERNEL_MIXTURES, mixture
from tests.model.stepping import Sequences
from tests.models import needs_compiler, own_cache

pytestmark = needs_compiler

TOKENS = torch.arange(5, 65) * 7 % gguf_models.VOCAB
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def load(path: Path, **options: Any) -> PagedModel:
    """Without conversion to floats."""
    chosen = {"quantization": "none", **options}
    model = load_model(ModelOptions(model=str(path), cache_dir=own_cache(path.parent), **chosen))
    assert model.mapped_bytes > 0
    return model


def difference(model: PagedModel, module: Any, *, typical: bool = False) -> float:
    """The largest difference, or the spread of the median token's: rounded scores choose other
    experts for some."""
    model.allocate_kv_cache(8)
    got = Sequences(model, [TOKENS], [[1, 2, 3, 4, 5]]).step({0: len(TOKENS)})[0]
    with torch.no_grad():
        expected = module(TOKENS[None]).logits[0]
    found = (got - expected) / expected.std()
    return float(found.std(-1).median() if typical else found.abs().max())


def folder_of(module: Any, folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """The module's configuration with other tensors."""
    module.config.architectures = [type(module).__name__]
    module.config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | config))
    contiguous = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One matrix per expert, as published Qwen3-MoE folders have them."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith(".experts"):
            found[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        for index, matrix in enumerate(tensor):
            found |= {
                f"{prefix}.{index}.{part}.weight": rows
                for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True)
            }
    return found


@pytest.mark.parametrize("arch", KERNEL_MIXTURES)
def test_folders_as_transformers_writes_them(tmp_path: Path, arch: str) -> None:
    module = mixture(arch)
    module.save_pretrained(tmp_path / "model")
    assert difference(load(tmp_path / "model"), module) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("arch", KERNEL_MIXTURES)
def test_stacked_tensors(tmp_path: Path, arch: str, dtype: torch.dtype) -> None:
    module = mixture(arch)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype).float()
    tensors = {name: tensor.to(dtype) for name, tensor in module.state_dict().items()}
    assert difference(load(folder_of(module, tmp_path / "model", tensors)), module) < 1e-3


def test_a_matrix_per_expert(tmp_path: Path) -> None:
    module = mixture("qwen3_moe")
    tensors = apart(dict(module.state_dict()))
    assert "model.layers.2.mlp.experts.5.up_proj.weight" in tensors
    assert difference(load(folder_of(module, tmp_path / "whole", tensors)), module) < 1e-3
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    with pytest.raises(ConfigError, match="automatic conversion of the weights"):
        load(folder_of(module, tmp_path / "part", tensors))


def mxfp4(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Random numbers and scales as safetensors have them, and their values [..., outputs,
    inputs]."""
    numbers = torch.randint(0, 256, (*shape[:-1], shape[-1] // 32, 16), dtype=torch.uint8)
    scales = torch.randint(122, 126, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8)
    codes = torch.stack([numbers & 15, numbers >> 4], -1).flatten(-2).long()
    values = E2M1[codes & 7] * torch.where(codes & 8 > 0, -1.0, 1.0)
    return numbers, scales, (values * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)


def test_mxfp4_of_safetensors(tmp_path: Path) -> None:
    """Kept in four bits in exact and int8 mode."""
    torch.manual_seed(0)
    module = mixture("gpt_oss")
    tensors = dict(module.state_dict())
    for name, parameter in list(module.named_parameters()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = parameter.shape
        numbers, scales, values = mxfp4((experts, outputs, inputs))
        parameter.data = values.mT.contiguous()
        del tensors[name]
        tensors |= {f"{name}_blocks": numbers, f"{name}_scales": scales}
    folder = folder_of(module, tmp_path / "model", tensors, quantization_config={"quant_method": "mxfp4"})
    exact = load(folder)
    assert difference(exact, module) < 1e-3
    stacks = sum(each.numel() for name, each in module.named_parameters() if name.endswith(("up_proj", "down_proj")))
    others = sum(each.numel() for each in module.parameters()) - stacks
    assert exact.mapped_bytes < 17 / 32 * stacks * 1.3 + 4 * others * 1.3
    assert difference(load(folder, quantization="int8"), module, typical=True) < 0.3
    if "avx512bf16" in usable_builds():
        load(folder, quantization="auto", dtype="bfloat16")


def test_bytes_that_are_no_experts_are_refused(tmp_path: Path) -> None:
    module = mixture("qwen3_moe")
    tensors = dict(module.state_dict())
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(128, 64, dtype=torch.uint8)
    folder = folder_of(module, tmp_path / "model", tensors)
    module = empty_module(module.config)
    with pytest.raises(UnsupportedModelError, match=r"q_proj.weight consists of bytes"):
        check_complete(open_safetensors(folder), module)


def test_other_quantized_weights_are_not_read_as_if_they_were_floats(tmp_path: Path) -> None:
    module = mixture("gpt_oss")
    folder = folder_of(
        module, tmp_path / "model", dict(module.state_dict()), quantization_config={"quant_method": "gptq", "bits": 4}
    )
    with pytest.raises(ConfigError):
        load(folder)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q4_0, Kind.Q8_0, Kind.MXFP4])
@pytest.mark.parametrize("architecture", ["qwen3moe", "gpt-oss"])
def test_stacked_matrices_of_gguf(tmp_path: Path, architecture: str, kind: Kind) -> None:
    module = gguf_models.module_of(architecture)
    tensors: dict[str, Any] = {}
    for name, rows in gguf_models._tensors(architecture, module):
        if "_exps.weight" in name and kind is not Kind.F32:
            tensors[name] = gguf.quantize(np.ascontiguousarray(rows, np.float32), kind)
    widened = {name: torch.from_numpy(gguf.dequantize(blocks, kind).copy()) for name, blocks in tensors.items()}
    with torch.no_grad():
        for layer, part in enumerate(module.model.layers if widened else ()):
            gate, up, down = (widened[f"blk.{layer}.ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
            experts = part.mlp.experts
            if architecture == "gpt-oss":
                experts.gate_up_proj.copy_(torch.stack([gate, up], 2).flatten(1, 2).mT)
                experts.down_proj.copy_(down.mT)
            else:
                experts.gate_up_proj.copy_(torch.cat([gate, up], 1))
                experts.down_proj.copy_(down)
    path = gguf_models.write_model(
        tmp_path / "tiny.gguf", architecture, module, tensors=tensors, quantized=dict.fromkeys(tensors, kind)
    )
    assert difference(load(path), module) < 1e-3
    assert difference(load(path, quantization="int8"), module, typical=True) < 0.3


def test_experts_of_another_shape_are_named(tmp_path: Path) -> None:
    module = gguf_models.module_of("qwen3moe")
    tensors = {"blk.1.ffn_up_exps.weight": np.zeros((4, 64, 64), np.float32)}
    path = gguf_models.write_model(tmp_path / "tiny.gguf", "qwen3moe", module, tensors=tensors)
    with pytest.raises(ConfigError, match=r"wrong shape: model.layers.1.mlp.experts.gate_up_proj"):
        load(path)


def test_neighbours_of_safetensors_are_halves_of_gguf() -> None:
    """As llama.cpp's converter turns them, and its reader reads them."""
    numbers, scales, values = mxfp4((4, 96))
    blocks = gguf_blocks(numbers.numpy(), scales.numpy().reshape(-1)).reshape(4, -1)
    assert np.array_equal(gguf.dequantize(blocks, Kind.MXFP4), values.numpy())
