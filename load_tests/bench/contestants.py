"""The contestants: our server in several modes, our engine without a server, and the peers.

Defines how each is started and called. `peer_setup` installs them, `peers` measures them. Each peer
runs 16 sequences at once, the minimum that our server may choose, and once more with its own
default (`NAME_defaults`). All get 4,096 tokens of context per sequence.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from load_tests.bench.peer_setup import PeerFolder
from load_tests.servers import ServerCommand
from serve_app.core.autosize import MIN_SLOTS
from serve_app.environment import ENGINE_ENVIRONMENT
from serve_app.launch.ports import free_port

_SEQUENCES, _CONTEXT = MIN_SLOTS, 4096
_BIN = Path(sys.executable).parent
_QUIET_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, slots=True)
class OfflineCommand:
    """A command that runs requests without a server, with the options of `offline`."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


Command = ServerCommand | OfflineCommand


@dataclass(frozen=True, slots=True)
class Contestant:
    """One line of the table. `make(folder, config)` returns its command.

    config: the Serve config that ours are derived from. needs: installations of `peer_setup`.
    exact: its weights have 16 bits or more. engine: it batches continuously but runs without a
    server; servers are compared with servers, and engines with engines.
    """

    what: str
    make: Callable[[PeerFolder, Path], Command]
    needs: tuple[str, ...] = ()
    ours: bool = False
    exact: bool = False
    engine: bool = False


def write_config(source: Path, target: Path, port: int, **args: Any) -> None:
    """Write the Serve config `source` with another port and other `args` of the application."""
    config = yaml.safe_load(source.read_text())
    config.setdefault("http_options", {})["port"] = port
    config["applications"][0]["args"] |= args
    target.write_text(yaml.safe_dump(config))


def _ours(
    name: str, start: tuple[str, ...], environment: Mapping[str, str], kind: str | None = None, **args: Any
) -> Any:
    """Return a contestant of ours. kind: of the peers' GGUF file to serve; None: the config's
    model."""

    def make(folder: PeerFolder, config: Path) -> ServerCommand:
        path, port = folder.path / f"{name}.yaml", free_port()
        write_config(config, path, port, **args, **_model(folder, kind))
        url = f"http://127.0.0.1:{port}"
        return ServerCommand(name, (*start, str(path)), url, "/health/ready", environment=environment)

    return make


def _model(folder: PeerFolder, kind: str | None) -> dict[str, str]:
    return {} if kind is None else {"model": str(folder.gguf(kind))}


def _offline(baseline: str, environment: Mapping[str, str], kind: str | None = None) -> Any:
    def make(folder: PeerFolder, config: Path) -> OfflineCommand:
        path = folder.path / f"offline-{kind or 'default'}.yaml"
        write_config(config, path, free_port(), **_model(folder, kind))
        command = (sys.executable, "-m", "load_tests.bench.offline", baseline, "--config", str(path))
        return OfflineCommand(command, environment)

    return make


def _openvino(kind: str, max_num_seqs: int | None) -> Any:
    def make(folder: PeerFolder, _config: Path) -> OfflineCommand:
        command = [sys.executable, "-m", "load_tests.bench.offline", "openvino", "--gguf", str(folder.gguf(kind))]
        if max_num_seqs is not None:
            command += ["--max-num-seqs", str(max_num_seqs)]
        path = os.pathsep.join(filter(None, (str(folder.packages("openvino")), os.environ.get("PYTHONPATH"))))
        return OfflineCommand(tuple(command), {"PYTHONPATH": path})

    return make


def _llama(kind: str, *options: str) -> Any:
    """Return llama-server with every core and memory for 16 sequences.

    Its number of sequences and flash attention are its own choice unless the options set them.
    """

    def make(folder: PeerFolder, _config: Path) -> ServerCommand:
        port, cores = free_port(), str(os.cpu_count())
        command = [str(folder.llama_server), "-m", str(folder.gguf(kind)), "--host", "127.0.0.1", "--port", str(port)]
        command += ["-t", cores, "-tb", cores, "-c", str(_SEQUENCES * _CONTEXT), "--no-ui", *options]
        return ServerCommand(f"llama_{kind.lower()}", tuple(command), f"http://127.0.0.1:{port}", "/health")

    return make


def _vllm(dtype: str, max_num_seqs: int | None) -> Any:
    """Return vLLM with every core bound by hand and the two libraries that its manual recommends
    preloaded.

    tcmalloc is the system's (Debian: libtcmalloc-minimal4); without it the preload leaves it out.
    """

    def make(folder: PeerFolder, _config: Path) -> ServerCommand:
        environment, port = folder.environment("vllm"), free_port()
        libraries = [environment / "lib/libiomp5.so", *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
        command = [str(environment / "bin/vllm"), "serve", str(folder.model), "--served-model-name", "default"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--max-model-len", str(_CONTEXT)]
        if max_num_seqs is not None:
            command += ["--max-num-seqs", str(max_num_seqs)]
        variables = {
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
            "VLLM_CACHE_ROOT": str(folder.path / "vllm" / "cache"),
            "LD_PRELOAD": ":".join(str(path) for path in libraries if path.exists()),
        }
        url = f"http://127.0.0.1:{port}"
        return ServerCommand("vllm", tuple(command), url, "/health", environment=_QUIET_ENVIRONMENT | variables)

    return make


def _transformers(folder: PeerFolder, _config: Path) -> ServerCommand:
    """Return `transformers serve`.

    It refuses unknown fields, and takes the number of tokens and sampling parameters in a JSON
    string.
    """
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
        extra_body={"generation_config": '{"max_new_tokens": $MAX_TOKENS, $SAMPLING}'},
        extensions=False,
        environment=_QUIET_ENVIRONMENT,
    )


def _ray_llm(max_num_seqs: int | None) -> Any:
    def make(folder: PeerFolder, _config: Path) -> ServerCommand:
        port = free_port()
        script = str(Path(__file__).with_name("ray_llm_app.py"))
        engine: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": _CONTEXT}
        if max_num_seqs is not None:
            engine["max_num_seqs"] = max_num_seqs
        command = (str(folder.environment("ray_llm") / "bin/python"), script, str(folder.model), str(port))
        variables = {
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(os.cpu_count()),
            "VLLM_CACHE_ROOT": str(folder.path / "ray_llm" / "cache"),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        return ServerCommand(
            "ray_serve_llm",
            (*command, json.dumps(engine)),
            f"http://127.0.0.1:{port}",
            "/v1/models",
            environment=_QUIET_ENVIRONMENT | variables,
        )

    return make


_SERVE_APP = (str(_BIN / "serve-app"), "serve")
# Ray must start a cluster of its own, whatever else runs on the machine.
_SERVE_RUN, _SERVE_RUN_ENVIRONMENT = (
    (str(_BIN / "serve"), "run"),
    {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"},
)

_LLAMA_SEQUENCES = ("--parallel", str(_SEQUENCES))


def _our_contestants() -> dict[str, Contestant]:
    return {
        "serve_app": Contestant("as `make serve` starts it", _ours("serve_app", _SERVE_APP, {}), ours=True),
        "serve_app_exact": Contestant(
            "`make serve`, quantization: none",
            _ours("serve_app_exact", _SERVE_APP, {}, quantization="none"),
            ours=True,
            exact=True,
        ),
        "serve_app_bfloat16": Contestant(
            "`make serve`, dtype: bfloat16",
            _ours("serve_app_bfloat16", _SERVE_APP, {}, dtype="bfloat16"),
            ours=True,
            exact=True,
        ),
        "serve_run": Contestant("plain `serve run`", _ours("serve_run", _SERVE_RUN, _SERVE_RUN_ENVIRONMENT), ours=True),
        "engine": Contestant(
            "our engine alone, no HTTP, no Ray", _offline("engine", ENGINE_ENVIRONMENT), ours=True, engine=True
        ),
        "serve_app_q4_0": Contestant(
            "`make serve` of the file that llama-server's and OpenVINO's Q4_0 are",
            _ours("serve_app_q4_0", _SERVE_APP, {}, "Q4_0"),
            ("llama",),
            ours=True,
        ),
        "engine_q4_0": Contestant(
            "our engine alone with that file",
            _offline("engine", ENGINE_ENVIRONMENT, "Q4_0"),
            ("llama",),
            ours=True,
            engine=True,
        ),
    }


def _openvino_contestants() -> Iterator[tuple[str, Contestant]]:
    needs = ("llama", "openvino")  # The model's files are llama.cpp's.
    for kind in ("Q4_0", "Q8_0"):
        name, what = f"openvino_{kind.lower()}", f"OpenVINO GenAI without a server, {kind}"
        yield name, Contestant(f"{what}, 16 sequences", _openvino(kind, _SEQUENCES), needs, engine=True)
        yield (
            f"{name}_defaults",
            Contestant(f"{what}, its default number of sequences", _openvino(kind, None), needs, engine=True),
        )


def _llama_contestants() -> Iterator[tuple[str, Contestant]]:
    for kind in ("Q4_0", "Q8_0", "BF16"):
        name, exact = f"llama_{kind.lower()}", kind == "BF16"
        for suffix, what, options in (
            ("", "16 sequences, flash attention", (*_LLAMA_SEQUENCES, "-fa", "on")),
            ("_no_flash", "16 sequences, no flash attention", (*_LLAMA_SEQUENCES, "-fa", "off")),
            ("_defaults", "its default number of slots and choice of attention", ()),
        ):
            yield (
                name + suffix,
                Contestant(f"llama-server, {kind}, {what}", _llama(kind, *options), ("llama",), exact=exact),
            )
    f16 = _llama("F16", *_LLAMA_SEQUENCES, "-fa", "on")
    yield "llama_f16", Contestant("llama-server, F16, 16 sequences, flash attention", f16, ("llama",), exact=True)


def _vllm_contestants() -> Iterator[tuple[str, Contestant]]:
    needs = ("model", "vllm")
    for dtype in ("float32", "bfloat16"):
        name, what = f"vllm_{dtype}", f"vllm-cpu, {dtype}"
        yield name, Contestant(f"{what}, 16 sequences", _vllm(dtype, _SEQUENCES), needs, exact=True)
        yield (
            f"{name}_defaults",
            Contestant(f"{what}, its default number of sequences", _vllm(dtype, None), needs, exact=True),
        )


def _other_contestants() -> Iterator[tuple[str, Contestant]]:
    what, needs = "continuous batching, float32, its default batch", ("model", "transformers")
    yield "transformers_serve", Contestant(what, _transformers, needs, exact=True)
    what, needs = "Ray Serve LLM on vllm-cpu, bfloat16", ("model", "ray_llm")
    yield "ray_serve_llm", Contestant(f"{what}, 16 sequences", _ray_llm(_SEQUENCES), needs, exact=True)
    yield (
        "ray_serve_llm_defaults",
        Contestant(f"{what}, its default number of sequences", _ray_llm(None), needs, exact=True),
    )
    what = "`generate`, static waves of 16, offline"
    yield "generate", Contestant(what, _offline("generate", {}), exact=True)


CONTESTANTS: dict[str, Contestant] = {
    **_our_contestants(),
    **dict(_openvino_contestants()),
    **dict(_llama_contestants()),
    **dict(_vllm_contestants()),
    **dict(_other_contestants()),
}
"""All contestants in the order in which they run.

Our engine runs between our servers, for comparison with them, and the other engine, because
machines drift.
"""
