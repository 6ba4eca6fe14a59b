"""The kernels compile for a GPU that is not there, which the interpreter cannot tell: types, shapes
of products, and what they take of a processor's registers and shared memory, which decides how many
programs it runs at once."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.wide

COMPILE = """
import json, re, subprocess, sys, tempfile
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime.jit import create_function_from_signature
from serve_app.model.gpu.kernels import attention, elementwise, experts, matmul, sampling, steps

name, types, constants, options = json.load(sys.stdin)
kernels = {**vars(attention), **vars(elementwise), **vars(experts), **vars(matmul), **vars(sampling), **vars(steps)}
kernel, target = kernels[name], GPUTarget("cuda", 90, 32)
# What a launch does with its arguments first, in a function that Triton writes, whose own names they must not have.
bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(target))
bind(*(None if parameter.is_constexpr else torch.zeros(1) for parameter in kernel.params))
names = kernel.arg_names
signature = {name: types.get(name, "constexpr") for name in names}
whole = [name for name in names if types.get(name, "")[:1] == "*" or name in ("inputs", "width", "outputs", "part")]
aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in whole}
source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
compiled = compile(source, target=target, options=options)
ptx = compiled.asm["ptx"]
with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
    file.write(ptx)
    file.flush()
    command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
print(json.dumps({"shared": compiled.metadata.shared, "wgmma": "wgmma.mma" in ptx, "mma": "mma.sync" in ptx,
                  "async": "cp.async" in ptx, "vectors": "ld.global.v4.b32" in ptx,
                  "registers": int(re.search(r"Used (\\d+) registers", said)[1]),
                  "spilled": int(re.search(r"(\\d+) bytes spill stores", said)[1])}))
"""
INDICES = dict.fromkeys(("tile_rows", "tile_firsts", "row_tiles", "query_starts", "kv_lens"), "*i32")
ATTEND = {
    **dict.fromkeys(("query", "key_cache", "value_cache", "sinks", "out"), "*bf16"),
    **dict.fromkeys(("partial_sums", "partial_stats"), "*fp32"),
    **INDICES,
    **dict.fromkeys(("tables", "table_lines"), "*i32"),
    **dict.fromkeys(("table_stride", "query_stride", "num_rows", "kept"), "i32"),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
}
FP8_CACHE = dict.fromkeys(("key_cache", "value_cache"), "*fp8e4nv")
SHAPE = {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "PAGE": 16}
VALUES = {"VALUE_DIM": 128, "VALUE_DIMS": 128}
TILE = {
    **SHAPE,
    **VALUES,
    "DIMS": 128,
    "BLOCK_N": 64,
    "CAPPED": False,
    "SINKS": False,
    "WINDOW": 0,
    "PRECISION": "tf32",
}
ROTATE = {
    **dict.fromkeys(("qkv", "query", "key_cache", "value_cache", "query_norm", "key_norm"), "*bf16"),
    **dict.fromkeys(("cos", "sin"), "*fp32"),
    **dict.fromkeys(("positions", "slots"), "*i64"),
    "num_tokens": "i32",
    "eps": "fp32",
}
TURN = {**SHAPE, "HALF": 64, "ROTATED": 64, "NORMED": True, "ROUNDED": True, "BLOCK": 8}
NORM = {**dict.fromkeys(("residual", "x", "x_weight", "weight", "out"), "*bf16"), "width": "i32", "eps": "fp32"}
SUM = {"ADD": True, "NORMED": False, "ROUNDED": True, "BLOCK": 4096}
GEMMA = dict.fromkeys(("x_weight", "weight"), "*fp32")
GEMMA_HEADS = {**ROTATE, **dict.fromkeys(("query_norm", "key_norm"), "*fp32")}
TURN_256 = {**TURN, "HEAD_DIM": 256, "HALF": 128, "ROTATED": 128, "ROUNDED": False}
MERGED = {"partial_sums": "*fp32", "partial_stats": "*fp32", "out": "*bf16", **INDICES, "kept": "i32"}
SHARED = {**INDICES, **dict.fromkeys(("num_rows", "split_keys"), "i32")}
GATED = {"gate_up": "*bf16", "out": "*bf16", "width": "i32"}
PARTS = {
    "logits": "*fp32",
    "parameters": "*fp64",
    "maxima": "*fp32",
    "firsts": "*i32",
    "sums": "*fp32",
    "vocab": "i32",
    "parts": "i32",
}
PRODUCT = {
    **dict.fromkeys(("x", "weight", "bias", "out"), "*bf16"),
    **dict.fromkeys(("scales", "row_scales"), "*fp32"),
    **dict.fromkeys(("rows", "outputs", "inputs", "part"), "i32"),
}
PRODUCT_FP8 = {**PRODUCT, **dict.fromkeys(("x", "weight"), "*fp8e4nv")}
WHOLE = {"BLOCK_K": 64, "EVEN": True, "BIASED": False, "SCALED": False, "SPLIT": False, "PRECISION": "tf32"}
WHOLE_FP8 = {**WHOLE, "BLOCK_K": 128, "SCALED": True}
D256 = {**TILE, "HEAD_DIM": 256, "VALUE_DIM": 256, "VALUE_DIMS": 256, "DIMS": 256, "BLOCK_N": 32}
SPLIT = {**TILE, "BLOCK_M": 16, "SPLIT": True}
LONG = {**TILE, "BLOCK_M": 128, "SPLIT": False}
MERGE = {"HEADS": 32, "KV_HEADS": 8, **VALUES, "MOST": 64, "CHUNK": 16}
SHARE = {"GROUP": 4, "BLOCK_M": 16, "WINDOW": 4096, "MOST": 64, "BLOCK": 256}
STEP = {
    **dict.fromkeys(("tokens", "token_ids"), "*i64"),
    **dict.fromkeys(("history", "tables", "kv_lens", "table_lines"), "*i32"),
    **dict.fromkeys(("rows", "history_stride", "table_stride"), "i32"),
}
MASKED = {"logits": "*fp32", "masks": "*u8", "vocab": "i32", "mask_bytes": "i32"}
DRAW = {**PARTS, "token_ids": "*i64"}
FEW, MANY = {"BLOCK_O": 64, "BLOCK_R": 16}, {"BLOCK_O": 128, "BLOCK_R": 128}
A_PART = {**WHOLE, **FEW, "BLOCK_R": 32, "SPLIT": True}
ADDED = {
    **dict.fromkeys(("parts", "scales", "row_scales"), "*fp32"),
    **dict.fromkeys(("bias", "out"), "*bf16"),
    **dict.fromkeys(("rows", "outputs"), "i32"),
}
ADD = {"PARTS": 4, "BIASED": False, "SCALED": True, "BLOCK": 512}
ROUNDED = {"x": "*bf16", "rounded": "*fp8e4nv", "row_scales": "*fp32", "inputs": "i32"}

PAIRS = {
    **dict.fromkeys(("ids", "counts", "order", "tiles", "num_tiles"), "*i32"),
    **dict.fromkeys(("pairs", "experts", "most"), "i32"),
}
ROUTED = {"scores": "*bf16", "slots": "*i64", "ids": "*i32", "factors": "*fp32", "experts": "i32"}
ROUTE = {"PER_TOKEN": 8, "RANKS": 8, "RENORMALISED": True, "BLOCK": 128}
ARRANGE = {"BLOCK_R": 16, "BLOCK": 1024, "BLOCK_E": 128}
EXPERT = {
    **{name: kind for name, kind in PRODUCT.items() if name not in ("rows", "part")},
    **dict.fromkeys(("order", "tiles", "num_tiles"), "*i32"),
    "most": "i32",
}
EXPERT_FP8 = {**EXPERT, **dict.fromkeys(("x", "weight"), "*fp8e4nv")}
CHOSEN = {"PER_TOKEN": 8, "GATHER": True, **{name: value for name, value in WHOLE.items() if name != "SPLIT"}}
CHOSEN_FP8 = {**CHOSEN, "BLOCK_K": 128, "SCALED": True, "GATHER": False}
CLAMPED = {"gate_up": "*bf16", "out": "*bf16", "width": "i32", "alpha": "fp32", "limit": "fp32"}
COMBINED = {"pairs": "*bf16", "ids": "*i32", "factors": "*fp32", "out": "*bf16", "width": "i32"}


@dataclass(frozen=True)
class Kernel:
    """registers: of a thread, shared: KiB of a program, spilled: bytes of a thread, each the most
    there may be."""

    name: str
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int
    registers: int
    shared: int
    spilled: int = 0


KERNELS = {
    "decode": Kernel("attend", ATTEND, SPLIT, 4, 2, 128, 40),
    "decode, window": Kernel("attend", ATTEND, {**SPLIT, "WINDOW": 4096}, 4, 2, 128, 40, 16),
    "decode, fp8 cache": Kernel("attend", {**ATTEND, **FP8_CACHE}, SPLIT, 4, 2, 128, 40, 32),
    "decode, 256 wide": Kernel("attend", ATTEND, {**D256, "BLOCK_M": 16, "SPLIT": True}, 4, 2, 208, 56),
    "decode, sinks": Kernel("attend", ATTEND, {**SPLIT, "SINKS": True}, 4, 2, 128, 40, 16),
    "prefill, sinks": Kernel("attend", ATTEND, {**LONG, "SINKS": True}, 8, 3, 200, 130),
    "prefill": Kernel("attend", ATTEND, LONG, 8, 3, 200, 130),
    "prefill, fp8 cache": Kernel("attend", {**ATTEND, **FP8_CACHE}, LONG, 8, 3, 200, 100),
    "prefill, 256 wide": Kernel("attend", ATTEND, {**D256, "BLOCK_M": 64, "SPLIT": False}, 8, 2, 200, 110),
    "deterministic": Kernel("attend", ATTEND, {**TILE, "BLOCK_M": 64, "SPLIT": False}, 4, 2, 248, 100),
    "share out": Kernel("share_out", SHARED, SHARE, 4, 3, 64, 1),
    "merge": Kernel("merge", MERGED, MERGE, 4, 3, 64, 8),
    "merge, one head": Kernel("merge", MERGED, {**MERGE, "KV_HEADS": 1, "MOST": 512}, 4, 3, 64, 8),
    "norm": Kernel("add_rms_norm", NORM, SUM, 8, 3, 48, 1),
    "norms, Gemma": Kernel("add_rms_norm", {**NORM, **GEMMA}, {**SUM, "NORMED": True, "ROUNDED": False}, 8, 3, 64, 1),
    "gate": Kernel("gate_times_up", GATED, {"GELU": False, "BLOCK": 1024}, 4, 3, 40, 0),
    "rotate, few": Kernel("rotate_and_store", ROTATE, {**TURN, "BLOCK": 1}, 1, 3, 40, 1),
    "rotate, many": Kernel("rotate_and_store", ROTATE, TURN, 4, 3, 40, 1),
    "rotate, a part": Kernel("rotate_and_store", ROTATE, {**TURN, "ROTATED": 16}, 4, 3, 48, 1),
    "rotate, none": Kernel("rotate_and_store", ROTATE, {**TURN, "ROTATED": 0}, 4, 3, 40, 1),
    "rotate, Gemma": Kernel("rotate_and_store", GEMMA_HEADS, TURN_256, 4, 3, 96, 1),
    "rotate, fp8 cache": Kernel("rotate_and_store", {**ROTATE, **FP8_CACHE}, {**TURN, "NORMED": False}, 4, 3, 40, 1),
    "prepare": Kernel("prepare", STEP, {"PAGE": 16, "BLOCK": 32}, 1, 3, 40, 0),
    "remember": Kernel("remember", STEP, {"BLOCK": 32}, 1, 3, 40, 0),
    "mask": Kernel("mask_out", MASKED, {"PART": 1024}, 4, 3, 40, 0),
    "scan": Kernel("scan_parts", PARTS, {"PART": 1024}, 4, 3, 40, 1),
    "draw": Kernel("draw", DRAW, {"PART": 1024, "PARTS": 256, "WAYS": 16}, 8, 3, 96, 8, 64),
    "product, one row": Kernel("product", PRODUCT, {**WHOLE, **FEW}, 4, 8, 64, 100),
    "product, a part": Kernel("product", {**PRODUCT, "out": "*fp32"}, A_PART, 4, 8, 64, 100),
    "product, 64 rows": Kernel("product", PRODUCT, {**WHOLE, **FEW, "BLOCK_R": 64}, 4, 6, 96, 100),
    "product, many rows": Kernel("product", PRODUCT, {**WHOLE, **MANY}, 8, 4, 128, 128),
    "product, many rows and outputs": Kernel("product", PRODUCT, {**WHOLE, **MANY, "BLOCK_R": 256}, 8, 3, 200, 160),
    "product, fp8, one row": Kernel("product", PRODUCT_FP8, {**WHOLE_FP8, **FEW}, 4, 8, 72, 100),
    "product, fp8, many rows": Kernel("product", PRODUCT_FP8, {**WHOLE_FP8, **MANY}, 8, 4, 200, 130),
    "parts": Kernel("add_parts", ADDED, ADD, 4, 3, 48, 0),
    "route": Kernel("route", ROUTED, ROUTE, 1, 3, 64, 0),
    "count": Kernel("count", PAIRS, {"BLOCK": 1024}, 4, 3, 40, 1),
    "arrange": Kernel("arrange", PAIRS, ARRANGE, 4, 3, 64, 8),
    "experts, few rows": Kernel("expert_product", EXPERT, {**CHOSEN, **FEW}, 4, 8, 96, 100),
    "experts, many rows": Kernel("expert_product", EXPERT, {**CHOSEN, **MANY}, 8, 4, 200, 130),
    "experts, fp8": Kernel("expert_product", EXPERT_FP8, {**CHOSEN_FP8, **FEW}, 4, 8, 96, 100),
    "experts, biases": Kernel("expert_product", EXPERT, {**CHOSEN, **FEW, "BIASED": True}, 4, 8, 96, 100),
    "clamped gate": Kernel("clamped_gate_times_up", CLAMPED, {"BLOCK": 1024}, 4, 3, 48, 0),
    "combine": Kernel("combine", COMBINED, {"PER_TOKEN": 8, "BLOCK": 1024}, 4, 3, 64, 0),
    "rounded rows": Kernel("round_rows", ROUNDED, {"LARGEST": 448.0, "BLOCK": 4096}, 8, 3, 64, 1),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_for_hopper(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    wanted = KERNELS[kernel]
    options = {"num_warps": wanted.warps, "num_stages": wanted.stages}
    if wanted.name == "attend" and wanted.constants["SPLIT"] and wanted.constants["DIMS"] <= 128:
        options["maxnreg"] = 128
    given = json.dumps([wanted.name, wanted.types, wanted.constants, options])
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], input=given, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["registers"] <= wanted.registers, facts
    assert facts["spilled"] <= wanted.spilled, facts
    assert facts["shared"] <= 1024 * wanted.shared, facts
    if wanted.name in ("product", "expert_product"):
        # The same instruction for few rows and for many: another one rounds in another order.
        assert facts["wgmma"]
    if wanted.name == "attend":
        assert facts["async"]
        assert facts["mma" if wanted.constants["BLOCK_M"] == 16 else "wgmma"]
    if wanted.name in ("gate_times_up", "add_rms_norm"):
        assert facts["vectors"]
