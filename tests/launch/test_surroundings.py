"""What the machine lacks is said in one line, with status 2, before anything starts."""

import errno
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.errors import ConfigError
from serve_app.launch import surroundings
from serve_app.launch.ports import check_port, free_port
from serve_app.launch.surroundings import check_surroundings, make_rays_token
from tests.serving.conftest import write_config


def refusal(folder: Path, environment: dict[str, str], shell: str = "") -> str:
    """The one line with which the command refuses to start."""
    config = write_config(folder, {}, 8000)
    command = f"{shell} exec {Path(sys.executable).with_name('serve-app')} serve {config}"
    done = subprocess.run(
        ["bash", "-c", command], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (2, ""), done
    (line,) = done.stderr.splitlines()
    assert line.startswith("serve-app: ")
    return line


def test_too_few_open_files(tmp_path: Path) -> None:
    line = refusal(tmp_path, {}, "ulimit -n 256;")
    assert line == "serve-app: at most 256 files may be open, but 1024 are needed: raise `ulimit -n`"


@pytest.mark.parametrize("home", ["/dev/null", "/proc/none"])
def test_a_home_that_cannot_be_written(tmp_path: Path, home: str) -> None:
    assert f"HOME: Ray's token cannot be written to {home}/.ray" in refusal(tmp_path, {"HOME": home})


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / ".cache").touch()
    line = refusal(tmp_path, {"HOME": str(tmp_path)})
    assert f"HOME: {tmp_path}/.cache/serve_app cannot be written" in line


def test_a_temporary_folder_that_is_missing_or_too_long_for_sockets(tmp_path: Path) -> None:
    assert "TMPDIR: /no/such cannot be written (No such file or directory)" in refusal(tmp_path, {"TMPDIR": "/no/such"})
    long = tmp_path / ("x" * 80)
    long.mkdir()
    assert f"TMPDIR: {long} is too long for the names of Ray's sockets" in refusal(tmp_path, {"TMPDIR": str(long)})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("_MIN_FREE_BYTES", 2**60, "MiB are free, but Ray needs"),
        ("_SHARED_MEMORY", Path("/no/such"), "/no/such is missing, but Ray needs it"),
        ("_PIDS", "pids", "at most 100 threads may run, but 1024 are needed"),
    ],
)
def test_a_full_disk_no_shared_memory_and_few_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object, said: str
) -> None:
    (tmp_path / "pids").write_text("100\n")
    check_surroundings(Path("/tmp"))
    monkeypatch.setattr(surroundings, name, tmp_path / value if isinstance(value, str) else value)
    with pytest.raises(ConfigError, match=said):
        check_surroundings(Path("/tmp"))


def test_a_full_tmp_is_none_of_rays_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's own files there are small."""
    full, roomy = shutil.disk_usage("/")._replace(free=2**20), shutil.disk_usage("/")._replace(free=2**40)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: full if place == Path("/tmp") else roomy)
    with pytest.raises(ConfigError, match="/tmp: 1 MiB are free"):
        check_surroundings(Path("/tmp"))
    check_surroundings(Path("/var/tmp"))


def test_a_home_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "link", refuse)
    make_rays_token()
    (token,) = (tmp_path / ".ray").iterdir()
    assert (len(token.read_text()), token.stat().st_mode & 0o777) == (64, 0o600)


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(ConfigError, match="this user has no home folder"):
        check_surroundings(Path("/tmp"))


@pytest.mark.parametrize("host", ["256.1.1.1", "no.such.host.invalid", "a\0b", "é" * 80, "192.0.2.1"])
def test_where_nothing_can_listen(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        check_port(host, free_port())


def test_a_port_in_use_and_ports_that_cannot_be() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(ConfigError, match="cannot listen"):
        check_port("127.0.0.1", server.getsockname()[1])
    for port in (0, 65_536, 99_999_999):
        with pytest.raises(ConfigError, match="is not between 1 and 65535"):
            check_port("127.0.0.1", port)


def test_a_soft_limit_of_open_files_is_raised(tmp_path: Path) -> None:
    """systemd's is 1024, with a higher hard one."""
    code = (
        "import resource; from pathlib import Path; from serve_app.launch.surroundings import check_surroundings; "
        "check_surroundings(Path('/tmp')); print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    command = ["bash", "-c", f'ulimit -S -n 300; exec "{sys.executable}" -c "{code}"']
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    soft, hard = map(int, done.stdout.split())
    assert soft == min(hard, 65_536)
