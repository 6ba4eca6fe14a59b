"""Loads a tiny random model of one family as the server does, in a process of its own."""

import logging
import multiprocessing
import re
import tempfile
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto as auto

from load_tests.families.shrink import VOCABULARY, shrink
from serve_app.errors import ConfigError
from serve_app.model.attention_backend import AttentionBatch, block_matrix
from serve_app.model.loader import load_model
from serve_app.model.options import ModelOptions
from serve_app.model.paged_model import PagedModel
from serve_app.model.quiet import quiet
from serve_app.model.sources.wrappers import auto_class

FAST, MODULES, REFUSED, WRONG, NOT_BUILT = "fast", "modules", "refused", "wrong", "not built"
_TOKENS = torch.arange(5, 60) * 7 % (VOCABULARY - 10)
_CONTEXT = 64
_LARGEST_DIFFERENCE = 1e-3
"""Of a logit, in standard deviations of the logits: float32, summed in another order."""
_MAPPINGS = (
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a family's model did. name: transformers' class. path: one of the constants above."""

    name: str
    path: str
    reason: str = ""


def families() -> Mapping[str, str]:
    """Return transformers' class by model type: causal LMs, and models with a text model inside."""
    found: dict[str, str] = {}
    for mapping in _MAPPINGS:
        for model_type, name in mapping.items():
            found.setdefault(model_type, name if isinstance(name, str) else name[0])
    return dict(sorted(found.items()))


def try_family(model_type: str, limit_s: float) -> Outcome:
    """Build and load the family's model in a forked process. It is ended after `limit_s`."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(model_type, sender))
    process.start()
    sender.close()
    name = families()[model_type]
    try:
        if not receiver.poll(limit_s):
            return Outcome(name, NOT_BUILT, f"it takes more than {limit_s:g} s")
        return Outcome(**receiver.recv())
    except EOFError:
        process.join()
        return Outcome(name, NOT_BUILT, f"its process ended with code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _child(model_type: str, sender: Connection) -> None:
    torch.set_num_threads(1)
    with quiet(), tempfile.TemporaryDirectory() as folder:
        sender.send(asdict(_load(model_type, Path(folder))))


def _load(model_type: str, folder: Path) -> Outcome:
    name = families()[model_type]
    try:
        config = shrink(CONFIG_MAPPING[model_type])
        module = auto_class(config).from_config(config, dtype=torch.float32).eval()
        torch.manual_seed(0)
        randomise(module)
        module.save_pretrained(folder / "model")
        config.save_pretrained(folder / "model")
    except Exception as error:  # transformers' modules may raise anything
        return Outcome(name, NOT_BUILT, _reason(f"{type(error).__name__}: {error}"))
    name = type(module).__name__
    with _messages() as messages:
        try:
            model = load_model(ModelOptions(model=str(folder / "model"), quantization="none", max_model_len=_CONTEXT))
        except ConfigError as error:
            return Outcome(name, REFUSED, _reason(str(error).replace(str(folder / "model"), "model")))
        except Exception as error:  # a defect of ours, which the page shows
            return Outcome(name, WRONG, _reason(f"{type(error).__name__}: {error}"))
    difference = _difference(model, module)
    if not difference < _LARGEST_DIFFERENCE:
        return Outcome(name, WRONG, f"its logits differ by {difference:.1g} standard deviations")
    if type(model.executor).__name__ == "CpuDecoder":
        return Outcome(name, FAST)
    return Outcome(name, MODULES, _reason(messages[-1]) if messages else "")


def randomise(module: Any) -> None:
    """Give all parameters other values than their defaults, in the order of their names."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.1)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


@torch.inference_mode()
def _difference(model: PagedModel, module: Any) -> float:
    """Return the largest difference of a logit from transformers' in standard deviations, for a
    text of 55 tokens in one step.
    """
    size, count = model.block_size, len(_TOKENS)
    blocks = range(1, 2 + count // size)
    model.allocate_kv_cache(1 + len(blocks))
    positions = torch.arange(count)
    batch = AttentionBatch([0, count], [count], block_matrix([blocks]), positions + size)
    found = model.compute_logits(model.forward(_TOKENS, positions, batch))
    expected = module(input_ids=_TOKENS[None], use_cache=False).logits[0]
    return float((found - expected).abs().max() / expected.std())


@contextmanager
def _messages() -> Any:
    """Collect the loader's reasons why a faster path is not taken."""
    reasons: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if " without " in record.msg:
                reasons.append(str(record.args[-1]))  # type: ignore[index]

    log, handler = logging.getLogger("serve_app.model"), Collect()
    log.addHandler(handler)
    try:
        yield reasons
    finally:
        log.removeHandler(handler)


def _reason(text: str) -> str:
    """Return one line in which nothing depends on the machine or the run."""
    line = " ".join(text.split())
    line = line.removeprefix("model: ").removeprefix("model ").removeprefix("model: ")
    line = re.sub(r"differ by \S+ standard deviations", "differ", line)
    return line if len(line) <= 160 else f"{line[:157]}..."


def versions() -> str:
    """Return the versions that decide the outcomes."""
    return f"transformers {transformers.__version__}"
