"""docs/reading.md: every file and name that it mentions exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reading.md").read_text()
FILES = sorted(set(re.findall(r"`((?:serve_app|tests)/[\w/]+\.py)`", PAGE)))
NAMES = sorted(set(re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)`", PAGE)))


def _defined(path: Path) -> set[str]:
    """Functions, classes, parameters, fields and attributes of a file; members also as
    `Class.member`."""
    tree = ast.parse(path.read_text())
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name):
                names |= {name, *(argument.arg for argument in node.args.args)}
            case ast.ClassDef(name=name):
                methods = [member.name for member in node.body if isinstance(member, ast.FunctionDef)]
                names |= {name, *(f"{name}.{method}" for method in methods)}
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.AnnAssign(target=ast.Attribute(attr=name)):
                names.add(name)
            case ast.Assign(targets=[ast.Attribute(attr=name)]):
                names.add(name)
    return names


def test_it_names_the_core() -> None:
    assert len(FILES) >= 10
    assert len(NAMES) >= 40


@pytest.mark.parametrize("name", FILES)
def test_files_exist(name: str) -> None:
    assert (ROOT / name).is_file()


def test_names_exist() -> None:
    known = set().union(*(_defined(ROOT / name) for name in FILES))
    assert [name for name in NAMES if name not in known] == []


def test_the_hour_is_an_hour() -> None:
    assert sum(map(int, re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE))) == 60
