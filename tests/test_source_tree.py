"""The package runs from its source tree, where no distribution of it is installed."""

import subprocess
import sys
import tomllib
from pathlib import Path

import serve_app

PROGRAM = """
from importlib.metadata import PackageNotFoundError, version
try:
    version("serve_app")
except PackageNotFoundError:
    pass
else:
    raise SystemExit("it is installed")
from serve_app.api.admission import AsyncAdmissionQueue
from serve_app.api.app import create_app
from serve_app.observability.tracing import RequestSpans
from tests.api.limits import make_limits
from tests.api.services import ScriptedService

RequestSpans("http://127.0.0.1:9", "model")
print(create_app(ScriptedService(None), AsyncAdmissionQueue(4, 4), make_limits(), None).version)
"""


def test_version_without_an_installed_distribution(tmp_path: Path) -> None:
    """Only its dependencies are on the path, beside a tree in which pip has left nothing."""
    (packages,) = (Path(path) for path in sys.path if path.endswith("site-packages"))
    for entry in packages.iterdir():
        if not entry.name.startswith(("serve_app", "__editable__")):
            (tmp_path / entry.name).symlink_to(entry)
    root = Path(serve_app.__file__).parents[1]
    for name in ("serve_app", "tests"):
        (tmp_path / name).symlink_to(root / name)
    done = subprocess.run(
        [sys.executable, "-S", "-W", "ignore", "-c", PROGRAM],
        env={"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,  # which is on the path too
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [serve_app.__version__]


def test_type_checkers_read_the_package() -> None:
    """PEP 561: the marker is in the tree, and in what is installed from it."""
    root = Path(serve_app.__file__).parents[1]
    package_data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert (root / "serve_app" / "py.typed").is_file()
    assert package_data["serve_app"] == ["py.typed"]
