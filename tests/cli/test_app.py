"""The command itself: what it offers, and that asking costs nothing."""

import subprocess
import sys

from typer.testing import CliRunner

import serve_app
from serve_app.cli import app


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.strip() == serve_app.__version__


def test_help_names_every_command() -> None:
    output = CliRunner().invoke(app, ["--help"]).output
    assert all(name in output for name in ("serve", "compare", "explain", "--version"))


def test_help_loads_nothing_heavy() -> None:
    """Nor what only the extra `load` installs."""
    heavy = ("torch", "ray", "transformers", "matplotlib", "aiohttp", "psutil")
    code = f"import sys, serve_app.cli; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
