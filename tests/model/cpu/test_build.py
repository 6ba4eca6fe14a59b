"""Which build is picked, how it is kept, and what happens without a compiler."""

import ctypes
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from serve_app.errors import ConfigError
from serve_app.model.cpu import build, ops
from serve_app.model.executors import cpu
from serve_app.model.loader import from_module
from tests.models import needs_compiler, tiny_model

SKYLAKE = "fpu avx avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512cd"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (SKYLAKE + " avx512_vnni avx512_bf16 avx_vnni amx_bf16 amx_int8 amx_tile", list(build.BUILDS)),
        (SKYLAKE + " avx512_vnni avx512_bf16 avx_vnni amx_tile", list(build.BUILDS)[1:]),
        (SKYLAKE + " avx512_vnni", ["avx512", "avx2", "portable"]),
        (SKYLAKE, ["avx2", "portable"]),
        ("fpu avx avx2 fma f16c avx_vnni", ["avxvnni", "avx2", "portable"]),
        ("fpu avx avx2 fma", ["portable"]),
        ("fpu sse2", ["portable"]),
    ],
)
def test_builds_for_a_cpu(tmp_path: Path, flags: str, expected: list[str]) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags\t\t: {flags}\n\nprocessor : 1\nflags\t\t: {flags}\n")
    assert build.usable_builds(cpuinfo) == expected
    missing = build.missing_for_faster(expected[0], cpuinfo)
    assert list(missing) == list(build.BUILDS)[: list(build.BUILDS).index(expected[0])]
    assert all(missing.values())


def test_a_cpu_that_tells_nothing_gets_the_portable_build(tmp_path: Path) -> None:
    assert build.usable_builds(tmp_path / "none") == ["portable"]
    (tmp_path / "arm").write_text("Features : fp asimd\n")
    assert build.usable_builds(tmp_path / "arm") == ["portable"]


@needs_compiler
@pytest.mark.wide
def test_compiled_once_and_again_when_a_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(build.SOURCES, sources)
    monkeypatch.setattr(build, "SOURCES", sources)
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
    build.load_library("portable", tmp_path)
    (first,) = (tmp_path / "kernels").glob("*.so")
    # a library of which the disk had nothing would kill every later start
    assert first.stat().st_ino in flushed
    written = first.stat().st_mtime_ns
    build.load_library("portable", tmp_path)
    assert first.stat().st_mtime_ns == written
    with (sources / "vec.h").open("a") as file:
        file.write("/* changed */\n")
    build.load_library("portable", tmp_path)
    assert len(list((tmp_path / "kernels").glob("*.so"))) == 2


@needs_compiler
def test_why_there_are_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "kernels.c").write_text("int f(void) { return missing; }\n")
    with monkeypatch.context() as patch:
        patch.setattr(build, "SOURCES", broken)
        with pytest.raises(build.KernelsUnavailableError, match="failed: .*missing"):
            build.load_library("portable", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(build.KernelsUnavailableError, match="Not a directory"):
        build.load_library("portable", tmp_path / "file")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.KernelsUnavailableError, match="no C compiler"):
        build.load_library("portable", tmp_path)


def test_without_a_compiler_torch_runs_the_model_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    module = tiny_model("llama", torch.float32)
    with caplog.at_level(logging.WARNING):
        model = from_module(module, quantization="auto")
    assert (model.attention_backend, model.quantization) == ("cpu", "none")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("runs without the CPU kernels: there is no C compiler (cc, gcc or clang)")
    for options in ({"quantization": "int8"}, {"attention_backend": "kernels"}):
        with pytest.raises(ConfigError, match="the CPU kernels cannot run it: there is no C compiler"):
            from_module(module, **options)


@needs_compiler
def test_without_avx2_torch_is_faster_and_runs_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "usable_builds", lambda: ["portable"])
    module = tiny_model("llama", torch.float32)
    assert from_module(module).attention_backend == "cpu"
    # Asked for by name, the portable build does it.
    assert from_module(module, quantization="int8").quantization == "int8"


@needs_compiler
def test_a_compiler_that_is_too_old_makes_the_next_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(build.BUILDS, "future", ("avx9999",))
    monkeypatch.setattr(cpu, "usable_builds", lambda: ["future", "portable"])
    with caplog.at_level(logging.INFO):
        options = {"quantization": "int8", "cache_dir": str(tmp_path)}
        assert "portable" in from_module(tiny_model("llama", torch.float32), **options).build
    (line,) = [record.getMessage() for record in caplog.records if "CPU kernels: build portable" in record.getMessage()]
    assert "future: " in line
    assert "avx9999" in line


@needs_compiler
def test_a_build_that_the_system_does_not_allow_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As Linux keeps AMX's registers from processes in some sandboxes."""
    sources = tmp_path / "sources"
    shutil.copytree(build.SOURCES, sources)
    text = (sources / "kernels.c").read_text()
    (sources / "kernels.c").write_text(text.replace("#if defined(BUILD_AMX)\n    return", "#if LANES == 4\n    return"))
    (sources / "amx_tile.h").write_text((sources / "amx_tile.h").read_text() + "\n#define tiles_allowed() 0\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(cpu, "usable_builds", lambda: ["portable"])
    with pytest.raises(ConfigError, match="the system does not allow this process to use it"):
        from_module(tiny_model("llama", torch.float32), quantization="int8", cache_dir=str(tmp_path))


@needs_compiler
def test_without_bfloat16_products_torch_runs_a_model_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "usable_builds", lambda: ["avx2", "portable"])
    module = tiny_model("llama", torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        assert from_module(module).attention_backend == "cpu"
    need = "bfloat16 requires AVX512-BF16; the best build here is avx2"
    assert need in caplog.text
    with pytest.raises(ConfigError, match=need):
        from_module(module, attention_backend="kernels")


@needs_compiler
def test_bfloat16_in_8_bits_is_refused() -> None:
    with pytest.raises(ConfigError, match="int8 requires dtype float32, not bfloat16"):
        from_module(tiny_model("llama", torch.bfloat16), quantization="int8")


@needs_compiler
def test_a_struct_that_differs_from_its_twin_in_c_is_an_error(
    monkeypatch: pytest.MonkeyPatch, kernels_folder: Path
) -> None:
    class Longer(ctypes.Structure):
        _fields_ = [*ops.LayerStruct._fields_, ("forgotten_in_c", ctypes.c_int64)]

    monkeypatch.setitem(ops._STRUCTS, "layer", Longer)
    with pytest.raises(RuntimeError, match="struct layer has"):
        ops.Kernels("portable", kernels_folder)
