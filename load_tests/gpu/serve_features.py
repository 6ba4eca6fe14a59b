"""What the default model answers through HTTP on a device, and what the server's metrics show of it."""

import asyncio
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from load_tests.chaos.traffic import MODEL, Ask, ask, open_session, send
from load_tests.gpu.checks import Checks, Result
from load_tests.gpu.serve_faults import PROMPTS
from load_tests.gpu.server import Started, server
from serve_app.system.http_client import fetch

_BF16_LIMIT = 0.02
"""Most by which bfloat16's log-probabilities of prompt tokens may differ from float32's, on average."""
_DASHBOARDS = Path("grafana/json")
_NEEDS_MORE = re.compile(r"_key_")
"""Series that exist only where API keys are configured."""
_ONLY_ON_GPUS = re.compile(r"_gpu_")

_TOO_MANY = Ask("too many", {"model": MODEL, "prompt": ["a"] * 5, "n": 128, "max_tokens": 1, "stream": True})
"""More sequences than one request may have in the queue: refused, which the metrics count."""

_REFERENCE = """
import json, sys, torch
from serve_app.model.sources.checkpoint import read_checkpoint
from serve_app.checkpoints.model_files import CACHE_DIR, locate_model
from serve_app.text.tokenizer import load_tokenizer
prompts, count, device = json.loads(sys.argv[1])
cpu = torch.device("cpu")
module = read_checkpoint(locate_model("default"), "float32", cpu, CACHE_DIR.expanduser(), lambda *_: None).to(device)
tokenizer = load_tokenizer("default")
texts = []
for prompt in prompts:
    ids = tokenizer.encode(prompt)
    found = module.generate(torch.tensor([ids], device=device), max_new_tokens=count, do_sample=False,
                            eos_token_id=None, pad_token_id=0)
    texts.append(tokenizer.decode(found[0, len(ids):].tolist()))
print("TEXTS" + json.dumps(texts))
"""
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
    """Greedy texts are transformers', every feature's answer is that of the CPU's exact mode."""
    gpu = device == "cuda"
    count = 48 if gpu else 16
    exact: dict[str, Any] = {"quantization": "none", "engine": {"kv_cache_gib": 0.5}, "ingress": {"tools": "hermes"}}
    with server(folder(), "cpu", dtype="float32", **exact) as cpu:
        expected = {name: _answer(cpu, *FEATURES[name]) for name in FEATURES}
        cpu_logprobs = _prompt_logprobs(cpu)
    with server(folder(), device, dtype="float32", **exact) as started:

        def texts() -> Result:
            wanted = _transformers_texts(count, device)
            found = [
                json.loads(_post(started, *_complete(prompt, max_tokens=count, ignore_eos=True)))["choices"][0]["text"]
                for prompt in PROMPTS
            ]
            equal = sum(a == b for a, b in zip(found, wanted, strict=True))
            return {"passed": equal == len(wanted), "equal": equal, "of": len(wanted), "ready_s": started.ready_s}

        def features() -> Result:
            unequal = [name for name in FEATURES if _answer(started, *FEATURES[name]) != expected[name]]
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


def check_metrics(checks: Checks, device: str, folder: Callable[[], Path]) -> None:
    """The gauges that operators watch move under load, and every series of the dashboards exists."""
    gpu = device == "cuda"
    engine: dict[str, Any] = {"kv_cache_gib": 0.5, "max_num_seqs": 16, "max_num_waiting": 16}
    dtype = "bfloat16" if gpu else "float32"
    with server(folder(), device, dtype=dtype, engine=engine, ingress={"max_queued_requests": 1024}) as started:
        pages = asyncio.run(_pages_under_load(started, 15 if gpu else 6))
        highest: dict[str, float] = {}
        for page in pages:
            for name, value in page.items():
                highest[name] = max(value, highest.get(name, 0.0))

        def gauges() -> Result:
            wanted = {
                "serve_app_engine_busy_ratio": 0.5,
                "serve_app_ingress_queue_depth": 1,
                "serve_app_waiting_served_ratio": 0.01,
                **({"serve_app_gpu_utilization_ratio": 0.5, "serve_app_gpu_memory_used_bytes": 1} if gpu else {}),
            }
            found = {name: highest.get(name, 0.0) for name in wanted}
            return {"passed": all(found[name] >= least for name, least in wanted.items()), **found}

        def dashboards() -> Result:
            text = _read(started, "/metrics")
            scraped = set(re.findall(r"^(serve_app_\w+)", text, re.MULTILINE))
            named = set(
                re.findall(r"\bserve_app_\w+", "".join(path.read_text() for path in _DASHBOARDS.glob("*.json")))
            )
            missing = {name for name in named - scraped if not _NEEDS_MORE.search(name)}
            missing = {name for name in missing if gpu or not _ONLY_ON_GPUS.search(name)}
            return {"passed": not missing, "series": len(named), "missing": ", ".join(sorted(missing))}

        checks.check("gauges under load", "move", gauges)
        checks.check("series of the dashboards", "all exist", dashboards)


async def _pages_under_load(started: Started, seconds: int) -> list[dict[str, float]]:
    """The application's metrics once a second, while 64 users ask."""
    async with open_session() as session:

        async def user(number: int) -> None:
            while True:
                await send(session, started.url, ask(str(number), PROMPTS[number % len(PROMPTS)], 100))

        users = [asyncio.create_task(user(number)) for number in range(64)]
        pages = []
        for _ in range(seconds):
            await asyncio.sleep(1)
            pages.append(await asyncio.to_thread(lambda: started.fleet.metrics() or {}))
        await send(session, started.url, _TOO_MANY)
        for task in users:
            task.cancel()
        await asyncio.gather(*users, return_exceptions=True)
    return pages


def _transformers_texts(count: int, device: str) -> list[str]:
    arguments = json.dumps([PROMPTS, count, device])
    done = subprocess.run([sys.executable, "-c", _REFERENCE, arguments], capture_output=True, text=True)
    line = next((line for line in done.stdout.splitlines() if line.startswith("TEXTS")), None)
    if line is None:
        raise RuntimeError(done.stderr[-1000:])
    return list(json.loads(line.removeprefix("TEXTS")))


def _prompt_logprobs(started: Started) -> list[float]:
    """Of every prompt token but the first, over all prompts."""
    found: list[float] = []
    for prompt in PROMPTS:
        answer = json.loads(_post(started, *_complete(prompt, max_tokens=1, echo=True, logprobs=0)))
        found += answer["choices"][0]["logprobs"]["token_logprobs"][1:-1]
    return found


def _answer(started: Started, path: str, body: dict[str, Any]) -> Any:
    """The answer without what differs between two servers; numbers rounded to what two devices agree on."""
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


def _read(started: Started, path: str) -> str:
    return fetch(started.url + path, timeout_s=30).decode()
