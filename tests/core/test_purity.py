import subprocess
import sys

HEAVY = ("torch", "ray", "transformers", "numpy", "pydantic", "fastapi")


def test_the_scheduler_loads_no_heavy_package() -> None:
    """In a fresh process: here the packages may be loaded already."""
    code = f"import sys, serve_app.core.scheduler; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
