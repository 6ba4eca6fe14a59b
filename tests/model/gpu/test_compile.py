"""The kernels compile for a GPU that is not there, which the interpreter cannot tell: types, shapes of products, and
that what they keep fits into registers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMPILE = """
import json, subprocess, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from serve_app.model.gpu.kernels import attention, elementwise, matmul, sampling

name, types, constants, options = json.load(sys.stdin)
kernel = next(found for module in (attention, elementwise, matmul, sampling) if (found := getattr(module, name, None)))
names = kernel.arg_names
signature = {name: types.get(name, "constexpr") for name in names}
whole = [name for name, kind in types.items() if kind[0] == "*" or name == "inputs"]
aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in whole}
source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
ptx = compiled.asm["ptx"]
# What does not fit into registers goes to local memory.
print(json.dumps({"shared": compiled.metadata.shared, "wgmma": "wgmma.mma" in ptx, "mma": "mma.sync" in ptx,
                  "async": "cp.async" in ptx, "stack": ".local" in ptx, "cubin": len(compiled.asm["cubin"])}))
"""
INDICES = dict.fromkeys(("tile_rows", "tile_firsts", "query_starts"), "*i32")
ATTEND = {
    **dict.fromkeys(("query", "key_cache", "value_cache", "out"), "*bf16"),
    **dict.fromkeys(("partial_sums", "partial_stats"), "*fp32"),
    **INDICES,
    **dict.fromkeys(("kv_lens", "tables"), "*i32"),
    **dict.fromkeys(("table_stride", "query_stride"), "i32"),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
}
FP8_CACHE = dict.fromkeys(("key_cache", "value_cache"), "*fp8e4nv")
SHAPE = {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "PAGE": 16}
VALUES = {"VALUE_DIM": 128, "VALUE_DIMS": 128}
TILE = {**SHAPE, **VALUES, "DIMS": 128, "BLOCK_N": 64, "CAPPED": False, "WINDOW": 0, "PRECISION": "tf32"}
ROTATE = {
    **dict.fromkeys(("qkv", "query", "key_cache", "value_cache", "query_norm", "key_norm"), "*bf16"),
    **dict.fromkeys(("cos", "sin"), "*fp32"),
    **dict.fromkeys(("positions", "slots"), "*i64"),
    "num_tokens": "i32",
    "eps": "fp32",
}
NORM = {**dict.fromkeys(("residual", "x", "weight", "out"), "*bf16"), "width": "i32", "eps": "fp32"}
MERGED = {"partial_sums": "*fp32", "partial_stats": "*fp32", "out": "*bf16", **INDICES}
GATED = {"gate_up": "*bf16", "out": "*bf16", "total": "i32", "width": "i32"}
PARTS = {
    "logits": "*fp32",
    "params": "*fp64",
    "maxima": "*fp32",
    "firsts": "*i32",
    "sums": "*fp32",
    "vocab": "i32",
    "parts": "i32",
}
PRODUCT = {
    **dict.fromkeys(("x", "bias", "out"), "*bf16"),
    "scales": "*fp32",
    **dict.fromkeys(("rows", "outputs", "inputs"), "i32"),
}
WHOLE = {"BLOCK_K": 64, "EVEN": True, "BIASED": False, "PRECISION": "tf32"}
KERNELS: dict[str, tuple[str, dict[str, str], dict[str, Any], int]] = {
    "decode": ("attend", ATTEND, {**TILE, "BLOCK_M": 16, "SPLITS": 4}, 4),
    "prefill": ("attend", ATTEND, {**TILE, "BLOCK_M": 128, "SPLITS": 1}, 8),
    "merge": ("merge", MERGED, {"HEADS": 32, "KV_HEADS": 8, **VALUES, "BLOCK_M": 16, "SPLITS": 16}, 4),
    "norm": ("add_rms_norm", NORM, {"ADD": True, "BLOCK": 4096}, 8),
    "gate": ("gate_times_up", GATED, {"GELU": False, "BLOCK": 1024}, 4),
    "scan": ("scan_parts", PARTS, {"PART": 1024}, 4),
    "draw": ("draw", {**PARTS, "token_ids": "*i64"}, {"PART": 1024, "PARTS": 256, "WAYS": 16}, 8),
    "decode fp8": ("attend", {**ATTEND, **FP8_CACHE}, {**TILE, "BLOCK_M": 16, "SPLITS": 4}, 4),
    "few rows": (
        "product",
        {**PRODUCT, "weight": "*bf16"},
        {**WHOLE, "BLOCK_O": 64, "BLOCK_R": 16, "SCALED": False},
        4,
    ),
    "fp8": ("product", {**PRODUCT, "weight": "*fp8e4nv"}, {**WHOLE, "BLOCK_O": 128, "BLOCK_R": 128, "SCALED": True}, 8),
    "rotate": ("rotate_and_store", ROTATE, {**SHAPE, "HALF": 64, "NORMED": True, "BLOCK": 8}, 4),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_for_hopper(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    *description, warps = KERNELS[kernel]
    given = json.dumps([*description, {"num_warps": warps, "num_stages": 3}])
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], input=given, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["cubin"] > 0
    assert not facts["stack"]
    if description[0] == "product":
        # The same instruction for few rows and for many: another one rounds in another order.
        assert facts["wgmma"]
        assert facts["shared"] <= 227 * 1024
    if description[0] == "attend":
        assert facts["async"]
        assert facts["wgmma" if kernel == "prefill" else "mma"]
        assert facts["shared"] <= 227 * 1024 // (1 if kernel == "prefill" else 4)
