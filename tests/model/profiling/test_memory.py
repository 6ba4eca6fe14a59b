from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_app.model.profiling import memory
from serve_app.model.profiling.memory import GIB

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


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


@dataclass
class Process:
    """On a GPU: its context, which torch does not count, and what torch holds, in bytes."""

    context: int
    reserved: int
    pool: int = 0


def look(card: list[Process], me: Process, total: int, share: float) -> int:
    """What `available_memory` says in `me`, one of the processes on a card of `total` bytes."""
    used = sum(process.context + process.reserved + process.pool for process in card)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (total - used, total))
        patch.setattr(torch.cuda, "memory_reserved", lambda device: me.reserved + me.pool)
        return memory.available_memory(GPU, share)


@given(
    st.integers(2, 4),
    st.integers(16, 140),
    st.floats(0.05, 0.9),
    st.integers(0, GIB // 2),
    st.data(),
)
def test_replicas_on_one_gpu_start_in_any_order_and_all_fit(
    replicas: int, total_gib: int, loaded: float, context: int, data: st.DataObject
) -> None:
    """Each loads, sizes its pool and allocates it later, while others do the same."""
    total = total_gib * GIB
    weights = int(loaded * (total / replicas - context))
    card: list[Process] = []
    sized: list[tuple[Process, int]] = []
    turns = data.draw(st.permutations([turn for turn in range(replicas) for _ in range(2)]))
    processes: dict[int, Process] = {}
    for turn in turns:
        if turn not in processes:
            me = processes[turn] = Process(context, weights)
            card.append(me)
            sized.append((me, look(card, me, total, 1 / replicas)))
        else:
            me, available = next(entry for entry in sized if entry[0] is processes[turn])
            me.pool = max(0, available)
    assert sum(process.context + process.reserved + process.pool for process in card) <= total
    assert {available for _, available in sized} == {int(total / replicas) - weights - GIB // 2}


def test_a_whole_gpu_is_what_is_free_of_it() -> None:
    me, other = Process(GIB // 2, 16 * GIB), Process(GIB // 2, 3 * GIB)
    assert look([me], me, 80 * GIB, 1.0) == 80 * GIB - 16 * GIB - GIB // 2
    assert look([me, other], me, 80 * GIB, 1.0) == 60 * GIB
    assert look([me], me, 80 * GIB, 0.5) == 40 * GIB - 16 * GIB - GIB // 2
    assert look([me, Process(0, 50 * GIB)], me, 80 * GIB, 0.5) == 13.5 * GIB, "others have more than their share"
