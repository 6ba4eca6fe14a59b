"""The container's packages: each has hashes, and is of the version that constraints.txt pins and
the tests run with."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
_PACKAGE = re.compile(
    r"^([\w.-]+)==([\w.+!]+)(?: ; [^\\\n]+)? \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", re.MULTILINE
)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _hashed() -> dict[str, str]:
    text = (ROOT / "deploy" / "requirements.txt").read_text()
    assert re.findall(r"^\S.*$", _PACKAGE.sub("", text), re.MULTILINE) == [
        line for line in text.splitlines() if line.startswith("#")
    ], "every line is a comment, or a package with its hashes"
    return {_plain(name): version for name, version in _PACKAGE.findall(text)}


def test_versions_are_those_of_the_constraints() -> None:
    """Beside them there is what torch wants to run on GPUs, or to compile itself: the tests have it
    for CPUs."""
    lines = (line.partition("==") for line in (ROOT / "constraints.txt").read_text().split())
    pinned = {_plain(name): version for name, _, version in lines}
    others = {name: version for name, version in _hashed().items() if pinned.get(name) != version}
    assert [name for name in others if not name.startswith(("nvidia-", "cuda-"))] == ["setuptools"]


def test_nothing_that_the_package_needs_is_missing() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {_plain(re.match(r"[\w.-]+", wanted)[0]) for wanted in project["dependencies"]}  # type: ignore[index]
    assert needed <= set(_hashed())
