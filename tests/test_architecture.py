"""The rules that keep the code readable: import arrows, sizes, who reads the environment,
documented public names."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import get_args

import grimp
import pytest
import yaml

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "serve_app"
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_CLASS_LINES = 360, 55, 225
MAX_SETTINGS = 45
"""Every setting is a promise to support it: raising this number is a decision, not an accident."""

SHORT_TASKS = {
    "api/endpoint.py": "a request's work, and its watcher, which end with it",
    "api/merging.py": "one for each prompt of a request",
    "api/sse.py": "the pings of one stream",
    "serving/front.py": "the first message of one request",
    "serving/replica.py": "the digest of the weights, which the start waits for",
}
"""Who may make tasks that nobody looks after, and why: they end with a request or with the
start."""
OWN_THREADS = {
    "experiments/compare_runs.py": "ends a process of a measurement with its parent",
    "grammars/library.py": "a deep stack for one call, whose error is handed to the caller",
    "engine/async_engine.py": "the step loop; its error ends the engine, which health checks see",
    "launch/bounded.py": "calls of Ray's, whose errors are handed to the caller",
    "launch/force_quit.py": "a second Ctrl-C; reads a pipe until it is closed",
    "launch/processes.py": "looks at Ray's node processes",
    "launch/launcher.py": "the watcher, which reports every error; the compiler, which ends",
    "launch/terminal.py": "writes lines to a pipe that may be full; drops those that cannot be written",
    "model/cpu/pages.py": "asks for memory while the model loads, and ends",
    "observability/metrics_port.py": "the metrics port's server, which answers or refuses each connection by itself",
    "text/template_check.py": "a time limit of one process",
}

SOURCES = sorted(PACKAGE.rglob("*.py"))
TOOLS = sorted((ROOT / "load_tests").rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def walk(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


def num_lines(node: ast.AST, first: int, last: int | None) -> int:
    """From `first` to `last`, without docstrings."""
    assert last is not None
    docs = [n.value for n in ast.walk(node) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    return last - first + 1 - sum(doc.end_lineno - doc.lineno + 1 for doc in docs if doc.end_lineno is not None)


def test_import_arrows_point_down() -> None:
    """import-linter reads its contracts from pyproject.toml."""
    lint_imports = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    assert lint_imports is not None, "import-linter is not installed in this environment"
    result = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for types alone and inside functions count too; import-linter looks at packages
    only."""
    graph = grimp.build_graph("serve_app", "load_tests", cache_dir=None)
    # which offers the engine's `LLM` by name, and has the version
    modules = graph.modules - {"serve_app"}
    imports = {module: graph.find_modules_directly_imported_by(module) & modules for module in modules}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("room", ["core", "fleet"])
def test_pure_rooms_load_nothing_heavy(room: str) -> None:
    """Seen in a process of its own: an import through a third package is found too."""
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (PACKAGE / room).glob("*.py")]
    assert modules
    code = f"import sys, {', '.join(modules)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "ray", "transformers", "numpy", "pydantic", "fastapi"} & set(result.stdout.split())


def test_what_ray_does_not_document_is_used_in_two_files() -> None:
    private = re.compile(
        r"ray\.[\w.]*\b_\w+|from ray[\w.]* import [^\n]*\b_\w+|_get_global_client|\._init\(|\._controller\b"
    )
    using = [str(path.relative_to(PACKAGE)) for path in SOURCES if private.search(path.read_text())]
    assert using == ["launch/ray_node.py", "serving/ray_patches.py"]


@pytest.mark.parametrize("path", SOURCES + TOOLS, ids=names(SOURCES + TOOLS))
def test_files_functions_and_classes_stay_small(path: Path) -> None:
    text = path.read_text()
    assert num_lines(ast.parse(text), 1, len(text.splitlines())) <= MAX_FILE_LINES
    for node in walk(path):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            most = MAX_CLASS_LINES if isinstance(node, ast.ClassDef) else MAX_FUNCTION_LINES
            lines = num_lines(node, node.lineno, node.end_lineno)
            assert lines <= most, f"{node.name} has {lines} lines"


def test_only_one_module_reads_the_environment() -> None:
    readers = set()
    for path in SOURCES:
        for node in walk(path):
            attribute = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv", "environb")
            imported = isinstance(node, ast.ImportFrom) and node.module == "os"
            if attribute or (imported and {alias.name for alias in node.names} & {"environ", "getenv"}):  # type: ignore[union-attr]
                readers.add(path.relative_to(PACKAGE).as_posix())
    assert readers == {"environment.py"}


def calls(path: Path, *called: str) -> bool:
    """Whether something of one of these names is called there, however it was imported."""
    for node in walk(path):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if name in called:
                return True
    return False


def test_what_lasts_is_run_by_the_helper_that_runs_it_again() -> None:
    """An error in a task that nobody awaits ends it in silence: `system.lasting` logs it and runs
    it again."""
    names = ("create_task", "ensure_future", "TaskGroup", "run_coroutine_threadsafe")
    making = {path.relative_to(PACKAGE).as_posix() for path in SOURCES if calls(path, *names)}
    assert making == {"system/lasting.py", *SHORT_TASKS}
    assert {path.relative_to(PACKAGE).as_posix() for path in SOURCES if calls(path, "Thread", "Timer")} == {
        *OWN_THREADS
    }


def test_nothing_is_decided_by_the_wall_clock() -> None:
    """It jumps, and differs between machines. Elsewhere it is shown, and keys expire by it."""
    wall_clock = re.compile(r"\btime\.time(_ns)?\(|import time_ns|datetime\.|CLOCK_REALTIME")
    rooms = ("core", "model", "engine", "fleet")
    reading = [path for room in rooms for path in (PACKAGE / room).rglob("*.py") if wall_clock.search(path.read_text())]
    assert reading == []


@pytest.mark.parametrize("path", SOURCES, ids=names(SOURCES))
def test_public_names_are_documented(path: Path) -> None:
    """Each module says what it decides; each public class and function says what it does."""
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree) or not tree.body, "the module has no docstring"
    for holder in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")]:
        for node in holder.body:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
                overload = any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)
                assert overload or ast.get_docstring(node), f"{node.name} has no docstring"


def test_the_number_of_settings_is_bounded() -> None:
    from pydantic import BaseModel

    from serve_app.settings import Settings

    def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
        for name, field in model.model_fields.items():
            sections = [
                part
                # a section may be optional
                for part in (field.annotation, *get_args(field.annotation))
                if isinstance(part, type) and issubclass(part, BaseModel)
            ]
            for section in sections:
                yield from leaves(section, f"{prefix}{name}.")
            if not sections:
                yield f"{prefix}{name}"

    settings = list(leaves(Settings))
    print(f"{len(settings)} settings: {', '.join(settings)}")
    assert 0 < len(settings) <= MAX_SETTINGS


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:  # an unpacked archive instead of a clone
        return [path for folder in ("serve_app", "tests", "load_tests") for path in (ROOT / folder).rglob("*.py")]
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_the_project_stands_on_its_own() -> None:
    """No file refers to a folder outside the repository that only its first authors had."""
    # Put together here, so that this file does not find itself.
    forbidden = ["/".join(("", "work", "")), "/".join(("..", "shared")), "/tmp/" + "brief", "." + "library/"]
    for path in tracked_files():
        if path.is_file() and path.suffix not in (".png", ".ico", ".woff2", ".gz"):
            text = path.read_text()
            found = [word for word in forbidden if word in text]
            assert not found, f"{path.relative_to(ROOT)} refers to {found}"


def test_each_commit_is_checked_as_make_check_does() -> None:
    """The hooks of pre-commit run the tools of `make check`, and no others."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    checks = [line.strip().replace("$(BIN)/", ".venv/bin/").removesuffix(" .") for line in recipe[1].splitlines()]
    assert [hook["entry"].removesuffix(" --force-exclude") for hook in hooks] == checks
