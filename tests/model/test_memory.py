from pathlib import Path

import pytest
import torch

from serve_app.model import memory

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
