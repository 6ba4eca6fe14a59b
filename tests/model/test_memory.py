from pathlib import Path

import pytest
import torch

from serve_app.errors import ConfigError
from serve_app.model import loader, memory
from serve_app.model.runner import ModelRunner
from tests.models import tiny_model

CPU = torch.device("cpu")


def test_available_memory_is_within_the_machine() -> None:
    total = next(
        int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line
    )
    assert 0 < memory.available_memory(CPU) <= total


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_tightest_control_group_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_own_cgroup", lambda: "pod/container")
    assert memory._cgroup_available(tmp_path) == memory._UNLIMITED
    write(tmp_path / "pod", memory__max="5000\n", memory__current="2000\n", memory__stat="anon 1\ninactive_file 300\n")
    write(tmp_path / "pod/container", memory__max="max\n", memory__current="1500\n")
    assert memory._cgroup_available(tmp_path) == 3300
    write(tmp_path / "pod/container", memory__max="1600\n")
    assert memory._cgroup_available(tmp_path) == 100


def test_a_container_that_sees_its_own_group_as_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_own_cgroup", lambda: "docker/abc")
    write(tmp_path / "memory", memory__limit_in_bytes="900", memory__usage_in_bytes="1000")
    assert memory._cgroup_available(tmp_path) == 0


def test_the_largest_step_has_as_many_tokens_as_fit_and_a_slow_one_is_not_timed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = loader.from_module(tiny_model("llama", torch.float64), max_model_len=64)
    runner = ModelRunner(model, 2, None)
    steps = []
    monkeypatch.setattr(runner, "profile_step", lambda tokens, rows: steps.append((tokens, rows)))
    assert memory.largest_step_s(runner, 100, 2) >= 0.0
    assert steps == [(100, 2)] * 2
    seconds = iter([0.1, 0.05, 30.0, 7.0])
    monkeypatch.setattr(memory, "_time", lambda _: next(seconds))
    assert memory.largest_step_s(runner, 500, 2) == 0.05
    assert memory.largest_step_s(runner, 500, 2) == 30.0


def test_a_step_that_does_not_fit_is_refused_by_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object) -> float:
        raise torch.OutOfMemoryError

    model = loader.from_module(tiny_model("llama", torch.float64), max_model_len=64)
    monkeypatch.setattr(memory, "_time", out_of_memory)
    with pytest.raises(ConfigError, match="max_num_batched_tokens: a step of 100 tokens does not fit"):
        memory.largest_step_s(ModelRunner(model, 2, None), 100, 2)
