"""What is kept from one start to the next: made once, repaired, replaced; done without where the
disk takes none."""

import logging
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.checkpoints import disk_cache
from serve_app.checkpoints.disk_cache import DiskCache, Key
from serve_app.errors import ConfigError
from tests.checkpoints.read_only import refuse_writes
from tests.examples import examples

SOURCE = Path(__file__)
KEY = Key(SOURCE, "", "1")


class Maker:
    """Writes a file of one line, or a folder with two such files, and counts how often."""

    def __init__(self, folder: bool = False) -> None:
        self.folder, self.made = folder, 0

    def make(self, path: Path) -> None:
        self.made += 1
        if self.folder:
            path.mkdir()
        for file in self.files(path):
            file.write_text("whole")

    def read(self, path: Path) -> str:
        texts = {file.read_text() for file in self.files(path)}
        if texts != {"whole"}:
            raise ValueError(f"it holds {texts}")
        return "whole"

    def files(self, path: Path) -> list[Path]:
        return [path / "a", path / "b"] if self.folder else [path]


@pytest.fixture(params=[False, True], ids=["file", "folder"])
def maker(request: pytest.FixtureRequest) -> Maker:
    return Maker(request.param)


def test_made_once(tmp_path: Path, maker: Maker) -> None:
    for _ in range(3):
        assert DiskCache(tmp_path, "kind").get(KEY, maker.make, maker.read) == "whole"
    assert maker.made == 1
    assert DiskCache(tmp_path, "kind").path(KEY).exists()


@pytest.mark.parametrize("damage", ["", "half", None])
def test_a_damaged_one_is_named_and_made_again(
    tmp_path: Path, maker: Maker, damage: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    cache = DiskCache(tmp_path, "kind")
    cache.get(KEY, maker.make, maker.read)
    file = maker.files(cache.path(KEY))[-1]
    if damage is not None:
        file.write_text(damage)
    elif maker.folder:
        file.unlink()
    else:
        return
    assert cache.get(KEY, maker.make, maker.read) == "whole"
    assert f"{cache.path(KEY)} is damaged" in caplog.text
    caplog.clear()
    assert cache.get(KEY, maker.make, maker.read) == "whole"
    assert (maker.made, caplog.text) == (2, "")


def test_what_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        DiskCache(tmp_path, "kind").get(KEY, fail, Path.read_text)
    assert list((tmp_path / "kind").iterdir()) == []


def test_a_disk_that_takes_nothing(
    tmp_path: Path, maker: Maker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also beside a damaged entry, which cannot be removed. A temporary folder takes it, where one
    is asked for."""
    cache, kept = DiskCache(tmp_path / "cache", "kind"), Key(SOURCE, "kept", "1")
    for key in (KEY, kept):
        cache.get(key, maker.make, maker.read)
    maker.files(cache.path(KEY))[-1].write_text("half")
    refuse_writes(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(disk_cache, "_temporary_root", lambda: tmp_path)
    assert cache.get(kept, maker.make, maker.read) == "whole"
    for key in (KEY, Key(SOURCE, "another", "1")):
        with pytest.raises(OSError, match="Read-only"):
            cache.get(key, maker.make, maker.read)
        assert cache.get_or_temporary(key, maker.make, maker.read) == "whole"
        assert f"cache_dir: cannot write {cache.path(key)}" in caplog.text
    refuse_writes(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="nor a temporary file"):
        cache.get_or_temporary(Key(SOURCE, "third", "1"), maker.make, maker.read)


@settings(max_examples=examples(50))
@given(
    keep=st.integers(1, 3),
    keys=st.lists(
        st.builds(Key, st.just(SOURCE), st.sampled_from(["", "a"]), st.sampled_from("1234")), min_size=1, max_size=12
    ),
)
def test_the_newest_of_each_group_stay(tmp_path_factory: pytest.TempPathFactory, keep: int, keys: list[Key]) -> None:
    cache, maker = DiskCache(tmp_path_factory.mktemp("cache"), "kind", ".x", keep), Maker()
    left: list[Key] = []
    for now, key in enumerate(keys):
        cache.get(key, maker.make, maker.read)
        if key not in left:
            os.utime(cache.path(key), ns=(now, now))
            group = [key, *(other for other in left if other.group == key.group)][:keep]
            left = [*group, *(other for other in left if other.group != key.group)]
        assert {*cache.path(key).parent.iterdir()} == {cache.path(one) for one in left}


def test_what_is_left_of_a_source_that_is_gone_goes_with_the_next(tmp_path: Path, maker: Maker) -> None:
    cache, source = DiskCache(tmp_path, "kind"), tmp_path / "source"
    source.touch()
    gone = Key(source, "", "1")
    cache.get(gone, maker.make, maker.read)
    source.unlink()
    cache.get(KEY, maker.make, maker.read)
    assert list((tmp_path / "kind").iterdir()) == [cache.path(KEY)]


def test_what_a_killed_writer_left_goes_and_nothing_else(tmp_path: Path, maker: Maker) -> None:
    cache = DiskCache(tmp_path, "kind")
    left, others = tmp_path / "kind" / f"tmp-{KEY.group}-x", tmp_path / "kind" / "tmp-others"
    for folder in (left, others):
        folder.mkdir(parents=True)
    cache.get(KEY, maker.make, maker.read)
    assert not left.exists()
    assert others.exists()


def _make_in_a_process(root: Path, pipe: Any) -> None:
    maker, waited = Maker(), []
    pipe.send("ready")
    pipe.recv()
    DiskCache(root, "kind").get(KEY, maker.make, maker.read, lambda: waited.append(True))
    pipe.send(maker.made)


def test_one_of_several_processes_makes_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(4)]
    processes = [context.Process(target=_make_in_a_process, args=(tmp_path, theirs)) for _, theirs in pipes]
    for process in processes:
        process.start()
    for ours, _ in pipes:
        assert ours.recv() == "ready"
    for ours, _ in pipes:
        ours.send(None)
    assert sum(ours.recv() for ours, _ in pipes) == 1
    for process in processes:
        process.join()
        assert process.exitcode == 0


def test_whoever_waits_is_told(tmp_path: Path, maker: Maker, caplog: pytest.LogCaptureFixture) -> None:
    cache, waited = DiskCache(tmp_path, "kind"), []
    lock = tmp_path / "locks" / f"kind-{KEY.group}.lock"

    def held() -> None:
        waited.append(True)
        holder.__exit__(None, None, None)

    holder = disk_cache.only_process(lock)
    holder.__enter__()
    with caplog.at_level(logging.WARNING):
        assert cache.get(KEY, maker.make, maker.read, held) == "whole"
    assert waited == [True]


def test_a_shared_folder_shares_its_locks(tmp_path: Path, maker: Maker) -> None:
    (shared := tmp_path / "shared" / "kind").mkdir(parents=True)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "kind").symlink_to(shared)
    DiskCache(tmp_path / "own", "kind").get(KEY, maker.make, maker.read)
    assert [path.suffix for path in (tmp_path / "shared" / "locks").iterdir()] == [".lock"]
    assert not (tmp_path / "own" / "locks").exists()
