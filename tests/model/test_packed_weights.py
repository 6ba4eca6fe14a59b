"""Packed weights on disk: mapped, shared by processes, replaced, and done without where the disk
takes none."""

import errno
import fcntl
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from load_tests.random_gguf import write_gguf
from serve_app.model.cpu import packed_file
from serve_app.model.loader import load_model
from serve_app.model.options import ModelOptions
from serve_app.model.paged_model import PagedModel
from serve_app.text.tokenizer import load_tokenizer
from tests.model.sources.test_gguf_file import config, kinds
from tests.model.stepping import Sequences
from tests.models import needs_compiler, own_cache

pytestmark = [needs_compiler, pytest.mark.wide]

TOKENS = torch.arange(3, 40) * 7 % 200


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    from gguf import GGMLQuantizationType as Kind

    return write_gguf(tmp_path / "small.gguf", config(tied=True), kinds(Kind.Q8_0, ffn_down=Kind.Q4_0))


def load(path: Path, news: list[str] | None = None, **options: Any) -> PagedModel:
    report = None if news is None else (lambda stage, fraction: news.append(stage))
    return load_model(ModelOptions(model=str(path), cache_dir=own_cache(path.parent), **options), report)


def logits(model: PagedModel) -> torch.Tensor:
    model.allocate_kv_cache(8)
    return Sequences(model, [TOKENS], [[1, 2, 3]]).step({0: len(TOKENS)})[0]


def packed_files(path: Path) -> list[Path]:
    return sorted((path.parent / "cache" / "packed").glob("*.weights"))


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_second_start_maps_what_the_first_has_packed(gguf: Path, quantization: str) -> None:
    first = load(gguf, quantization=quantization)
    news: list[str] = []
    second = load(gguf, news, quantization=quantization)
    assert "loading weights" not in news
    assert "mapping weights" in news
    assert second.mapped_bytes == first.mapped_bytes >= second.cost.weight_bytes
    assert torch.equal(logits(second), logits(first))
    (gguf.parent / "cache" / "packed").rename(gguf.parent / "kept")
    (gguf.parent / "cache" / "packed").touch()  # where a folder should be
    in_memory = load(gguf, quantization=quantization)
    assert in_memory.mapped_bytes == 0
    assert torch.equal(logits(in_memory), logits(first))


@pytest.mark.parametrize("direct", [True, False])
def test_the_file_is_the_same_in_many_writes_and_through_the_cache(
    gguf: Path, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices in more than one piece; a file system that cannot be written to past the system's
    cache."""
    expected = logits(load(gguf))
    (packed,) = packed_files(gguf)
    packed.unlink()
    monkeypatch.setattr(packed_file, "_AT_ONCE", 4096)
    written, refused = os.pwrite, []

    def no_direct(descriptor: int, data: Any, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return written(descriptor, data, offset)

    if not direct:
        monkeypatch.setattr(os, "pwrite", no_direct)
    assert torch.equal(logits(load(gguf)), expected)
    assert bool(refused) != direct
    assert packed_files(gguf) == [packed]


def test_each_mode_keeps_its_file_and_a_changed_model_replaces_them(gguf: Path) -> None:
    load(gguf, quantization="none")
    load(gguf, quantization="int8")
    before = packed_files(gguf)
    assert len(before) == 2
    os.utime(gguf, ns=(0, 0))
    changed = load(gguf, quantization="none")
    after = packed_files(gguf)
    assert len(after) == 2
    assert len({*before} & {*after}) == 1
    assert changed.mapped_bytes > 0


@pytest.mark.parametrize(
    "damage",
    [lambda whole: whole[:-9], lambda whole: b"", lambda whole: whole + b"more", lambda whole: whole + b"\xff" * 8],
)
def test_a_damaged_file_is_named_and_made_again(
    gguf: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(load(gguf))
    (path,) = packed_files(gguf)
    path.write_bytes(damage(path.read_bytes()))
    model = load(gguf)
    assert f"{path} is damaged" in caplog.text
    assert model.mapped_bytes > 0
    assert torch.equal(logits(model), expected)
    caplog.clear()
    assert load(gguf).mapped_bytes > 0
    assert caplog.text == ""


def test_what_a_killed_writer_left_goes_with_the_next(gguf: Path) -> None:
    """And nobody else's, who may be alive."""
    context = multiprocessing.get_context("spawn")
    killed = context.Process(target=_pack_until_killed, args=(gguf,))
    killed.start()
    killed.join()
    folder = gguf.parent / "cache" / "packed"
    (left,) = folder.glob("tmp-*")
    assert killed.exitcode == -signal.SIGKILL
    (others := folder / "tmp-others").mkdir()
    load(gguf)
    assert not left.exists()
    assert others.exists()


def _pack_until_killed(path: Path) -> None:
    def die(_descriptor: int) -> None:
        if list((path.parent / "cache" / "packed").glob("tmp-*/*")):
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = die
    load(path)


def test_what_is_kept_was_on_disk_before_it_got_its_name(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or an empty file could have that name after a power failure, and every start read it.
    Blueprints that cannot be read are made again."""
    flushed: set[int] = set()
    flush = os.fsync

    def record(descriptor: int) -> None:
        flush(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", record)
    load(gguf)
    cache = gguf.parent / "cache"
    load_tokenizer("default", cache)
    kept = [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert {path.relative_to(cache).parts[0].partition("-")[0] for path in kept} == {
        *("blueprints", "gguf", "packed", "tokenizers"),
    }
    assert [path for path in kept if path.stat().st_ino not in flushed and path.parent.name != "blueprints"] == []


def test_processes_that_start_at_once_share_the_memory(gguf: Path) -> None:
    """Each of two that find nothing there: one packs, both map the same file."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    processes = [context.Process(target=_load_and_wait, args=(gguf, theirs)) for _, theirs in pipes]
    for process in processes:
        process.start()
    try:
        mapped = {ours.recv() for ours, _ in pipes}
        found = [_of_file(process.pid, packed_files(gguf)[0]) for process in processes]
    finally:
        for ours, _ in pipes:
            ours.send(None)
        for process in processes:
            process.join()
    assert len(mapped) == 1
    for sizes in found:
        assert sizes["Rss"] > 0
        assert sizes["Pss"] <= sizes["Rss"] // 2 + 4
        assert sizes["Private_Dirty"] == 0


def _load_and_wait(path: Path, pipe: Connection) -> None:
    model = load(path)
    logits(model)
    pipe.send(model.mapped_bytes)
    pipe.recv()


def _of_file(pid: int | None, path: Path) -> dict[str, int]:
    """KiB of a process's mapping of a file, as the kernel counts them."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    _, _, entry = text.partition(str(path))
    return {name: int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB$", entry.partition("VmFlags")[0], re.M)}
