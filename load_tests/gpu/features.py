"""All features of requests on a device and on the CPU: tokens, probabilities and vectors are
compared.

A tensor on the wrong device fails only on a GPU, and benchmarks use few parameters.
"""

import importlib.util
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from load_tests.gpu.steps import paged, random_module
from serve_app import grammars
from serve_app.core.request import EngineRequest
from serve_app.core.results import TokenDelta, join_deltas
from serve_app.core.sampling_params import SamplingParams
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.grammars.token_set import Vocabulary
from serve_app.model.profiling.memory import GIB

_LENGTHS = (3, 17, 64, 130)
_TOLERANCE = 1e-3
"""Tolerance of log-probabilities and vectors."""


def features(config: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Compare an engine's answers on the device with one's on the CPU.

    All requests run at once, with a KV pool that is too small for them.
    """
    module = random_module(config, torch.device("cpu"), torch.float32)
    module.generation_config.eos_token_id = 1
    work = _requests(config["vocab_size"])
    vocabulary = _vocabulary(config["vocab_size"])
    expected = _answers(deepcopy(module), work, vocabulary)
    found = _answers(module.to(device), work, vocabulary)
    complete = found.keys() == expected.keys() and {name for name, _ in expected} == {one.request_id for one in work}
    wrong = sorted({key[0] for key in expected.keys() & found.keys() if not _same(expected[key], found[key])})
    return {"passed": complete and not wrong, "of": len(work), "wrong": ", ".join(wrong), "grammars": _has_grammars()}


def _has_grammars() -> bool:
    return importlib.util.find_spec("llguidance") is not None


def _requests(vocab: int) -> list[EngineRequest]:
    drawn: dict[str, dict[str, Any]] = {
        "plain": {},
        "top-k": {"top_k": 20},
        "top-p": {"top_p": 0.8, "temperature": 0.7},
        "min-p": {"min_p": 0.05},
        "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        "bias": {"logit_bias": ((5, 4.0), (7, -100.0))},
        "allowed": {"allowed_token_ids": (3, 9, 27, 81)},
        "bad words": {"bad_words": ((3,), (9, 27))},
        "stop": {"stop_token_ids": tuple(range(0, vocab, 4)), "min_tokens": 4},
        "choices": {"n": 3},
        "log-probabilities": {"logprobs": 5},
        "prompt's": {"logprobs": 0, "prompt_logprobs": 2},
    }
    every: dict[str, SamplingParams] = {}
    for name, fields in drawn.items():
        every[name] = SamplingParams(seed=len(every), max_tokens=24, **fields)
        every[f"{name}, greedy"] = SamplingParams(**{"max_tokens": 24, **fields, "temperature": 0.0})
    if _has_grammars():
        every["regex"] = SamplingParams(seed=1, max_tokens=24, grammar=grammars.regex("[0-9]{3}-[a-f]{2,8}"))
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        every["schema"] = SamplingParams(max_tokens=24, temperature=0.0, grammar=grammars.json_schema(schema))
    every["last"] = SamplingParams.for_embedding("last", None)
    every["mean"] = SamplingParams.for_embedding("mean", 16)
    generator = torch.Generator().manual_seed(2)
    ids: list[int] = torch.randint(2, vocab, (max(_LENGTHS),), generator=generator).tolist()
    # They begin alike, so that most find blocks of others in the prefix cache.
    return [
        EngineRequest(name, (*ids[: _LENGTHS[index % len(_LENGTHS)]], index + 2), params)
        for index, (name, params) in enumerate(every.items())
    ]


def _vocabulary(vocab: int) -> Callable[[], Vocabulary]:
    """Return a vocabulary: 0 and 1 are control tokens, then every byte, then the bytes again."""
    tokens = [b"", b"", *(bytes([index % 256]) for index in range(vocab - 2))]
    return lambda: Vocabulary(tokens, frozenset({0, 1}), lambda text: [2 + byte for byte in text.encode()])


def _answers(
    module: Any, work: Sequence[EngineRequest], vocabulary: Callable[[], Vocabulary]
) -> dict[tuple[str, int], TokenDelta]:
    """Return all outputs of each choice, by request id and number."""
    model = paged(module, max_model_len=256)
    blocks = 64
    settings = EngineConfig(
        max_num_seqs=16,
        max_num_batched_tokens=64,
        kv_cache_gib=(blocks + 1.5) * model.kv_bytes_per_block() / GIB,
        speculation="off",
    )
    core = EngineCore(model, settings, vocabulary=vocabulary)
    for request in work:
        core.prepare(request)
        core.add(request)
    deltas: dict[str, list[TokenDelta]] = {}
    while core.has_unfinished:
        for delta in core.step() or ():
            if delta.error is not None:
                raise delta.error
            deltas.setdefault(delta.request_id, []).append(delta)
    return {(whole.request_id, whole.choice): whole for parts in deltas.values() for whole in join_deltas(parts)}


def _same(expected: TokenDelta, found: TokenDelta) -> bool:
    exact = (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason)
    return exact and all(
        len(ours) == len(theirs) and np.allclose(ours, theirs, rtol=0, atol=_TOLERANCE)
        for ours, theirs in zip(_numbers(found), _numbers(expected), strict=True)
    )


def _numbers(answer: TokenDelta) -> tuple[list[float], list[float], list[float]]:
    vector = np.frombuffer(answer.embedding or b"", "<f4").tolist()
    return [entry.logprob for entry in answer.logprobs], [entry.logprob for entry in answer.prompt_logprobs], vector
