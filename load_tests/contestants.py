"""Who is measured: our server in its ways to start, our engine without a server, and the peers near their defaults.

Decides how each is started and spoken to; installs nothing (see `peer_setup`) and measures nothing (see `peers`).
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from load_tests.peer_setup import PeerFolder
from load_tests.servers import ServerCommand, free_port
from serve_app.settings import ENGINE_ENVIRONMENT

_SEATS, _CONTEXT = 16, 2048
_BIN = Path(sys.executable).parent
_QUIET_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, slots=True)
class OfflineCommand:
    """How to run requests without a server: a command that takes `--workloads` and the like, see `offline`."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


Command = ServerCommand | OfflineCommand


@dataclass(frozen=True, slots=True)
class Contestant:
    """One line of the table. `make(folder, config)` says how to start it; `config` is the Serve config ours begin with.

    needs: installations of `peer_setup`. exact: it computes with unquantized weights.
    """

    what: str
    make: Callable[[PeerFolder, Path], Command]
    needs: tuple[str, ...] = ()
    ours: bool = False
    exact: bool = False


def write_config(source: Path, target: Path, port: int, **args: Any) -> None:
    """The Serve config `source` on another port, with other `args` of the application."""
    config = yaml.safe_load(source.read_text())
    config.setdefault("http_options", {})["port"] = port
    config["applications"][0]["args"] |= args
    target.write_text(yaml.safe_dump(config))


def _ours(name: str, start: tuple[str, ...], environment: Mapping[str, str], **args: Any) -> Any:
    def make(folder: PeerFolder, config: Path) -> ServerCommand:
        path, port = folder.path / f"{name}.yaml", free_port()
        write_config(config, path, port, **args)
        url = f"http://127.0.0.1:{port}"
        return ServerCommand(name, (*start, str(path)), url, "/health/ready", environment=environment)

    return make


def _offline(baseline: str, environment: Mapping[str, str]) -> Any:
    def make(folder: PeerFolder, config: Path) -> OfflineCommand:
        command = (sys.executable, "-m", "load_tests.offline", baseline, "--config", str(config))
        return OfflineCommand(command, environment)

    return make


def _llama(kind: str) -> Any:
    def make(folder: PeerFolder, _config: Path) -> ServerCommand:
        port, cores = free_port(), str(os.cpu_count())
        command = [str(folder.llama_server), "-m", str(folder.gguf(kind)), "--host", "127.0.0.1", "--port", str(port)]
        command += ["-t", cores, "-tb", cores, "-c", str(_SEATS * _CONTEXT), "--parallel", str(_SEATS), "--no-ui"]
        return ServerCommand(f"llama_{kind.lower()}", tuple(command), f"http://127.0.0.1:{port}", "/health")

    return make


def _vllm(folder: PeerFolder, _config: Path) -> ServerCommand:
    """vLLM with every core bound by hand and the two libraries preloaded that its manual asks for.

    tcmalloc is the system's (Debian: libtcmalloc-minimal4); without it the preload leaves it out.
    """
    environment, port = folder.environment("vllm"), free_port()
    libraries = [environment / "lib/libiomp5.so", *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
    command = [str(environment / "bin/vllm"), "serve", str(folder.model), "--served-model-name", "default"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", str(_CONTEXT), "--max-num-seqs", str(_SEATS)]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_CACHE_ROOT": str(folder.path / "vllm" / "cache"),
        "LD_PRELOAD": ":".join(str(path) for path in libraries if path.exists()),
    }
    return ServerCommand(
        "vllm", tuple(command), f"http://127.0.0.1:{port}", "/health", environment=_QUIET_ENVIRONMENT | variables
    )


def _transformers(folder: PeerFolder, _config: Path) -> ServerCommand:
    """`transformers serve`: it refuses fields it does not know and takes the number of tokens in a JSON string."""
    port, model = free_port(), str(folder.model)
    command = [str(folder.environment("transformers") / "bin/transformers"), "serve", model, "--continuous-batching"]
    command += ["--device", "cpu", "--dtype", "float32", "--attn-implementation", "sdpa"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    return ServerCommand(
        "transformers_serve",
        tuple(command),
        f"http://127.0.0.1:{port}",
        "/health",
        model=model,
        extra_body={"generation_config": '{"max_new_tokens": $MAX_TOKENS, "do_sample": false}'},
        extensions=False,
        environment=_QUIET_ENVIRONMENT,
    )


def _ray_llm(folder: PeerFolder, _config: Path) -> ServerCommand:
    port = free_port()
    python = str(folder.environment("ray_llm") / "bin/python")
    command = (python, str(Path(__file__).with_name("ray_llm_app.py")), str(folder.model), str(port))
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(os.cpu_count()),
        "VLLM_CACHE_ROOT": str(folder.path / "ray_llm" / "cache"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    url = f"http://127.0.0.1:{port}"
    return ServerCommand("ray_serve_llm", command, url, "/v1/models", environment=_QUIET_ENVIRONMENT | variables)


_SERVE_APP = (str(_BIN / "serve-app"), "serve")
# Ray must start a cluster of its own, whatever else runs on the machine.
_SERVE_RUN, _SERVE_RUN_ENVIRONMENT = (
    (str(_BIN / "serve"), "run"),
    {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"},
)

CONTESTANTS: dict[str, Contestant] = {
    "serve_app": Contestant("as `make serve` starts it", _ours("serve_app", _SERVE_APP, {}), ours=True),
    "engine": Contestant("our engine alone, no HTTP, no Ray", _offline("engine", ENGINE_ENVIRONMENT), ours=True),
    "serve_app_exact": Contestant(
        "`make serve`, quantization: none",
        _ours("serve_app_exact", _SERVE_APP, {}, quantization="none"),
        ours=True,
        exact=True,
    ),
    "serve_run": Contestant("plain `serve run`", _ours("serve_run", _SERVE_RUN, _SERVE_RUN_ENVIRONMENT), ours=True),
    "llama_q4_0": Contestant("llama-server, Q4_0", _llama("Q4_0"), ("llama",)),
    "llama_q8_0": Contestant("llama-server, Q8_0", _llama("Q8_0"), ("llama",)),
    "llama_f16": Contestant("llama-server, F16", _llama("F16"), ("llama",), exact=True),
    "vllm": Contestant("vllm-cpu, float32", _vllm, ("model", "vllm"), exact=True),
    "transformers_serve": Contestant(
        "continuous batching, float32", _transformers, ("model", "transformers"), exact=True
    ),
    "ray_serve_llm": Contestant("Ray Serve LLM on vllm-cpu, float32", _ray_llm, ("model", "ray_llm"), exact=True),
    "generate": Contestant("`generate`, static waves of 16, offline", _offline("generate", {}), exact=True),
}
"""In the order in which they run. The engine comes next to the server whose path it measures, since machines drift."""
