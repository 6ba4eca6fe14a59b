"""The pages say what the code says: settings, links, commands, and the changelog's first version.

`python -m tests.test_readme` writes the table of settings again.
"""

import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import serve_app
from serve_app.cli import app
from serve_app.model.paged_model import PagedModel
from serve_app.settings import setting_rows
from tests.observability.prometheus import defined_series, metric_names

ROOT = Path(__file__).parent.parent
SETTINGS = ROOT / "docs" / "settings.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
MAX_README_BYTES = 8 * 1024
MAX_PROSE_COLUMNS = 125

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_CODE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _marked(page: Path, name: str) -> str:
    return page.read_text().partition(f"<!-- {name}:begin -->\n")[2].partition(f"<!-- {name}:end -->")[0]


def _settings_table() -> str:
    rows = (f"| `{key}` | `{default}` | {meaning} |\n" for key, default, meaning in setting_rows())
    return "| key | default | meaning |\n|---|---|---|\n" + "".join(rows)


def _anchors(page: Path) -> set[str]:
    """The fragments that GitHub makes of a page's headings."""
    titles = _HEADING.findall(_CODE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _commands() -> list[str]:
    """Every line of the pages' shell code, without its comment, and of the notebooks'."""
    blocks = [block for page in PAGES for kind, block in _CODE.findall(page.read_text()) if kind == "bash"]
    cells = [cell for path in ROOT.glob("docs/*.ipynb") for cell in json.loads(path.read_text())["cells"]]
    blocks += [line[1:] for cell in cells for line in cell["source"] if line.startswith("!")]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return sorted({" ".join(words) for line in lines if (words := shlex.split(line, comments=True))})


def test_settings_page_is_the_tree_of_settings() -> None:
    assert _marked(SETTINGS, "settings") == _settings_table()


def test_readme_names_settings_and_defaults_that_exist() -> None:
    known = {(key, default) for key, default, _ in setting_rows()}
    shown = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", _marked(ROOT / "README.md", "main-settings"), re.MULTILINE)
    assert len(shown) >= 12
    assert set(shown) <= known


def test_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= MAX_README_BYTES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    for target in _LINK.findall(_CODE.sub("", page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, fragment = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.is_file(), f"{page.name} links to {target}"
        if fragment:
            assert fragment in _anchors(linked), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_is_wrapped(page: Path) -> None:
    lines = _CODE.sub("", page.read_text()).splitlines()
    # Tables, and words that cannot be broken, may be longer.
    long = [line for line in lines if len(line) > MAX_PROSE_COLUMNS and not line.startswith(("|", "!["))]
    assert long == []


def test_every_page_is_linked_from_the_readme() -> None:
    readme = set(_LINK.findall((ROOT / "README.md").read_text()))
    assert {f"docs/{page.name}" for page in PAGES if page.parent == ROOT / "docs"} <= readme


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_exist(page: Path) -> None:
    for name in re.findall(r"`([\w./-]+/[\w.-]*\.(?:py|yaml|yml|md))`", _CODE.sub("", page.read_text())):
        assert (ROOT / name).is_file() or (ROOT / "serve_app" / name).is_file(), f"{page.name} names {name}"


@pytest.mark.parametrize("command", _commands())
def test_commands_exist(command: str) -> None:
    program, *arguments = command.split()
    match Path(program).name:
        case "make":
            targets = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert arguments[0] in targets
        case "python" if arguments[0] == "-m" and arguments[1] != "pytest":
            assert importlib.util.find_spec(arguments[1]) is not None
        case "serve-app":
            named: Any = get_command(app)
            while hasattr(named, "commands"):
                named = named.commands[arguments.pop(0)]
            known = {option for parameter in named.params for option in parameter.opts}
            assert {word for word in arguments if word.startswith("--")} <= known
        case "serve":
            assert (ROOT / arguments[1]).is_file()
        case "locust":
            assert (ROOT / arguments[1]).is_file()


def test_architecture_names_every_room() -> None:
    rooms = {f"{path.parent.name}/" for path in ROOT.glob("serve_app/*/__init__.py")}
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## Rooms")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+/)` \|", table, re.MULTILINE)) == rooms


def test_metrics_that_pages_name_exist() -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    histograms = {name.removesuffix("_count") for name in defined_series() if name.endswith("_count")}
    assert metric_names(page) <= defined_series() | histograms


def test_readme_example_runs(
    default_model: PagedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("serve_app.engine.core.load_model", lambda options, on_progress: default_model)
    (example,) = (code for kind, code in _CODE.findall((ROOT / "README.md").read_text()) if kind == "python")
    exec(example, {})
    assert "The capital of France is Paris" in " ".join(capsys.readouterr().out.split())


def test_changelog_begins_with_this_version() -> None:
    first = re.search(r"^## \[?([0-9.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first.group(1) == serve_app.__version__


if __name__ == "__main__":
    head, rest = SETTINGS.read_text().split("<!-- settings:begin -->\n")
    tail = rest.partition("<!-- settings:end -->")[2]
    SETTINGS.write_text(f"{head}<!-- settings:begin -->\n{_settings_table()}<!-- settings:end -->{tail}")
