"""The default model's answers through HTTP on a device."""

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from load_tests.chaos.traffic import MODEL
from load_tests.gpu.checks import Checks, Result
from load_tests.gpu.reference import reference_texts
from load_tests.gpu.serve_faults import PROMPTS
from load_tests.gpu.server import Started, server, together
from serve_app.system.http_client import fetch

_BF16_LIMIT = 0.02
"""Maximum mean difference of prompt log-probabilities between bfloat16 and float32."""
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
    },
}


def _chat(text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"max_tokens": 40, "messages": [{"role": "user", "content": text}], **fields}


def _complete(prompt: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": prompt, "max_tokens": 24, "temperature": 0, **fields}


FEATURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "chat": _chat("Name the capital of France.", temperature=0),
    "sampled": _complete("Once upon a time", temperature=0.9, top_p=0.9, seed=7),
    "choices": _complete("Once upon a time", temperature=1.0, seed=8, n=3),
    "log-probabilities": _complete("Water boils at", logprobs=3),
    "echo": _complete("Water boils at", logprobs=1, echo=True),
    "penalties": _complete("One, two,", repetition_penalty=1.3, frequency_penalty=0.4),
    "bias": _complete("One, two,", logit_bias={"33": -100}),
    "stop": _complete("One, two,", stop=[","]),
    "schema": _chat(
        "A person, as JSON.",
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": _PERSON}},
    ),
    "regex": _complete("A date: ", structured_outputs={"regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}"}),
    "tool": _chat("Weather in Rome?", temperature=0, tools=[_TOOL], tool_choice="required"),
    "messages": (
        "/v1/messages",
        {"max_tokens": 16, "temperature": 0, "messages": [{"role": "user", "content": "Say hello."}]},
    ),
    "responses": ("/v1/responses", {"max_output_tokens": 16, "temperature": 0, "input": "Say hello."}),
    "embeddings": ("/v1/embeddings", {"input": ["one", "two words"]}),
}


def check_tokens(checks: Checks, device: str, folder: Callable[[], Path]) -> None:
    """Check greedy texts against transformers', and every feature against the CPU's exact mode."""
    gpu = device == "cuda"
    count = 48 if gpu else 16
    exact: dict[str, Any] = {"quantization": "none", "engine": {"kv_cache_gib": 0.5}, "ingress": {"tools": "hermes"}}
    pair = together(
        server(folder(), "cpu", dtype="float32", **exact), server(folder(), device, dtype="float32", **exact)
    )
    with pair as (cpu, started):
        cpu_logprobs = _prompt_logprobs(cpu)

        def texts() -> Result:
            wanted = reference_texts(PROMPTS, count, device)
            found = [
                json.loads(_post(started, *_complete(prompt, max_tokens=count, ignore_eos=True)))["choices"][0]["text"]
                for prompt in PROMPTS
            ]
            equal = sum(a == b for a, b in zip(found, wanted, strict=True))
            return {"passed": equal == len(wanted), "equal": equal, "of": len(wanted), "ready_s": started.ready_s}

        def features() -> Result:
            unequal = [name for name, ask in FEATURES.items() if _answer(started, *ask) != _answer(cpu, *ask)]
            return {"passed": not unequal, "of": len(FEATURES), "unequal": ", ".join(unequal)}

        checks.check("default model, float32, greedy", "transformers' texts", texts)
        checks.check("default model, float32, every feature", "the answers of the CPU's exact mode", features)
    if gpu:
        with server(folder(), device, dtype="bfloat16", **exact) as rounded:

            def difference() -> Result:
                apart = [abs(a - b) for a, b in zip(_prompt_logprobs(rounded), cpu_logprobs, strict=True)]
                mean = statistics.mean(apart)
                return {"passed": mean <= _BF16_LIMIT, "ratio": mean / _BF16_LIMIT, "mean": mean, "max": max(apart)}

            checks.check("default model, bfloat16, log-probabilities", f"mean difference <= {_BF16_LIMIT}", difference)


def _prompt_logprobs(started: Started) -> list[float]:
    """Return the log-probabilities of all prompts' tokens, without the first of each."""
    found: list[float] = []
    for prompt in PROMPTS:
        answer = json.loads(_post(started, *_complete(prompt, max_tokens=1, echo=True, logprobs=0)))
        found += answer["choices"][0]["logprobs"]["token_logprobs"][1:-1]
    return found


def _answer(started: Started, path: str, body: dict[str, Any]) -> Any:
    """Return the answer without fields that differ between servers, and with rounded numbers."""
    return _comparable(json.loads(_post(started, path, body)))


def _comparable(value: Any) -> Any:
    if isinstance(value, dict):
        names = {"id", "created", "created_at", "completed_at", "system_fingerprint", "call_id", "model"}
        return {name: _comparable(inner) for name, inner in value.items() if name not in names}
    if isinstance(value, list):
        return [_comparable(inner) for inner in value]
    return round(value, 2) if isinstance(value, float) else value


def _post(started: Started, path: str, body: dict[str, Any]) -> bytes:
    text = json.dumps({"model": MODEL, **body}).encode()
    return fetch(started.url + path, timeout_s=120, json_body=text)
