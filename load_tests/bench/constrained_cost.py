"""The cost of constraints, and what they save.

    python -m load_tests.bench.constrained_cost grammars --json FILE
    python -m load_tests.bench.constrained_cost engine --json FILE
    python -m load_tests.bench.constrained_cost servers --contestants serve_app --json FILE

`grammars`: CPU time to build, check and walk a new grammar. `engine`, without a server: decoding of
16 rows of which 0, 1 or 16 have a grammar, without speculation; and one user's nested order with
and without its grammar, with speculation in both and the same forced text. `servers`, over HTTP:
TTFT without a schema, with a known one of 30 nested fields, and with a new one; then tokens per
second of 1 and 16 users, with and without a grammar.

Measurements take turns over several rounds; the first round is a warm-up. Figures are medians over
the rounds.
"""

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated, Any

import typer
import uvloop
import yaml
from rich.console import Console
from rich.table import Table
from torch import Tensor

from load_tests.bench.contestants import CONTESTANTS
from load_tests.bench.peer_setup import PeerFolder, set_up
from load_tests.servers import ServerCommand, running
from serve_app import grammars
from serve_app.cli.outputs import JsonFile
from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.model.loader import load_model
from serve_app.model.paged_model import PagedModel
from serve_app.model.runner import set_num_threads
from serve_app.model.sampling.rows import SamplingRows
from serve_app.model.sampling.sampler import PendingSample, Sampled
from serve_app.model.token_samplers import TokenSampler, pick_sampler
from serve_app.settings import Settings
from serve_app.text.tokenizer import Tokenizer, load_tokenizer
from serve_app.workloads.client import RequestResult, Server, open_session, send
from serve_app.workloads.machine import machine
from serve_app.workloads.mixes import WorkItem
from serve_app.workloads.prompts import PromptWriter, open_writer
from serve_app.workloads.runs import reach

ROWS, CONTEXT, DECODED = 16, 96, 128
_TEXT = {"type": "string", "maxLength": 200}
_SKU = {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_ITEM = _object(
    {"sku": _SKU, "name": _TEXT, "count": {"type": "integer", "minimum": 1, "maximum": 99}, "gift": {"type": "boolean"}}
)
ORDER = _object(
    {
        "id": {"type": "string", "format": "uuid"},
        "created_at": {"type": "string", "format": "date-time"},
        "customer": _object(
            {"name": _TEXT, "address": _object({"street": _TEXT, "city": _TEXT, "postal_code": _TEXT})}
        ),
        "items": {"type": "array", "items": _ITEM, "minItems": 1, "maxItems": 20},
        "note": _TEXT,
    }
)
"""Schema of the nested order."""
AN_ORDER = {
    "id": "3f2b8c1e-9d47-4a60-8b15-c7e0d2f4a913",
    "created_at": "2026-11-23T14:05:00Z",
    "customer": {
        "name": "Ada Byron",
        "address": {"street": "12 St James's Square", "city": "London", "postal_code": "SW1Y 4LB"},
    },
    "items": [
        {"sku": "AB1234", "name": "brass gear wheel", "count": 24, "gift": False},
        {"sku": "CD0077", "name": "punched cards, blank", "count": 2, "gift": True},
        {"sku": "EF4410", "name": "drive belt of leather", "count": 3, "gift": False},
    ],
    "note": "Please leave it with the porter.",
}
ENDLESS = {"type": "array", "items": ORDER, "minItems": 100}
"""Schema whose answers do not end during a measurement."""


def thirty_fields(number: int) -> dict[str, Any]:
    """Return a nested schema of 30 fields that differs from those of other numbers."""
    groups = {
        f"group_{group}": _object({f"field_{number}_{group}_{i}": _TEXT if i % 2 else _SKU for i in range(5)})
        for group in range(5)
    }
    return _object(groups)


def _turns(rounds: int, measures: Mapping[str, Callable[[int], float]]) -> dict[str, Any]:
    """Return medians of measures that take turns, and their ratios to the first one.

    One round is a warm-up.
    """
    values: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(rounds + 1):
        for name, measure in measures.items():
            value = measure(number)
            if number:
                values[name].append(value)
    medians = {name: median(measured) for name, measured in values.items()}
    first = next(iter(medians.values()))
    return {name: {"median": round(value, 2), "ratio": round(value / first, 3)} for name, value in medians.items()}


# Grammars.


def _first_time_ms(schema: Callable[[int], dict[str, Any]], number: int) -> float:
    start = time.process_time()
    grammars.json_schema(schema(number))
    return 1e3 * (time.process_time() - start)


def measure_grammars(rounds: int) -> dict[str, Any]:
    """Return the figures of command `grammars`. Every round has new schemas."""
    fields: dict[str, Callable[[int], dict[str, Any]]] = {
        "3 fields": lambda n: _object({f"a{n}": _TEXT, "b": {"type": "integer"}, "c": {"type": "boolean"}}),
        "30 fields": thirty_fields,
        "nested order": lambda n: {**ORDER, "title": f"order {n}"},
        "200 alternatives with patterns": lambda n: {
            "anyOf": [
                _object({f"k{n}_{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i + 1}}}$"}}) for i in range(200)
            ]
        },
        "1,000 required fields": lambda n: _object({f"field {n} {i}": {"type": "string"} for i in range(1000)}),
    }
    return {"first time, ms": _turns(rounds, {name: partial(_first_time_ms, make) for name, make in fields.items()})}


# The engine.


class Dictated:
    """A sampler that samples as usual but then returns a given text. For one request at a time."""

    def __init__(self, inner: TokenSampler, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        self._inner, self._token_ids, self._num_prompt_tokens = inner, token_ids, num_prompt_tokens

    def __call__(self, hidden: Tensor, rows: SamplingRows, history: Tensor | None) -> PendingSample:
        """Sample like `TokenSampler`."""
        self._inner(hidden, rows, history).resolve()
        last = len(self._token_ids) - 1
        return Sampled([self._token_ids[min(int(n) - self._num_prompt_tokens, last)] for n in rows.num_tokens])


def decode_rate(core: EngineCore, grammar: str, constrained: int, seed: int) -> float:
    """Return tokens per second while all rows decode, the first `constrained` of them with the
    grammar."""
    rng = Random(seed)
    for row in range(ROWS):
        ids = tuple(rng.randrange(1000, core.info.vocab_size) for _ in range(CONTEXT))
        params = SamplingParams(temperature=0.0, max_tokens=DECODED, ignore_eos=True)
        if row < constrained:
            params = replace(params, ignore_eos=False, grammar=grammar)
        core.add(EngineRequest(f"{seed} {row}", ids, params))
    begun: set[str] = set()
    while len(begun) < ROWS:
        begun |= {delta.request_id for delta in core.step() or () if delta.token_ids}
    tokens, ended, start = 0, False, time.perf_counter()
    while not ended:
        deltas = core.step() or []
        tokens += sum(len(delta.token_ids) for delta in deltas)
        ended = any(delta.finish_reason is not None for delta in deltas)
    seconds = time.perf_counter() - start
    while core.has_unfinished:
        core.step()
    return tokens / seconds


def dictated_rate(core: EngineCore, prompt: Sequence[int], num_tokens: int, grammar: str | None) -> float:
    """Return tokens per second of one user's answer, without the first token's time."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, grammar=grammar)
    core.add(EngineRequest("order", tuple(prompt), params))
    tokens, start = 0, 0.0
    while core.has_unfinished:
        for delta in core.step() or ():
            if delta.error is not None:
                raise RuntimeError(delta.error)
            start = start or time.perf_counter()
            tokens += len(delta.token_ids)
    return (tokens - 1) / (time.perf_counter() - start)


def measure_engine(config: EngineConfig, tokenizer: Tokenizer, rounds: int) -> dict[str, Any]:
    """Return the figures of command `engine`."""
    if config.num_threads is not None:
        set_num_threads(config.num_threads)
    model = load_model(config.model)
    config = replace(config, enable_prefix_cache=False)
    core = EngineCore(model, replace(config, speculation="off"), vocabulary=tokenizer.vocabulary)
    endless = grammars.json_schema(ENDLESS)
    decode = _turns(
        rounds,
        {f"{count} of {ROWS} rows constrained": partial(decode_rate, core, endless, count) for count in (0, 1, ROWS)},
    )
    prompt = tokenizer.encode("Write the order as JSON.\n")
    answer = [*tokenizer.encode(json.dumps(AN_ORDER), add_special_tokens=False), model.eos_token_ids[0]]
    dictated = Dictated(pick_sampler(model.executor, model.facts), answer, len(prompt))
    single = EngineCore(PagedModel(model.facts, model.executor, dictated), config, vocabulary=tokenizer.vocabulary)
    order = grammars.json_schema(ORDER)
    users = _turns(
        rounds,
        {
            "free": lambda _: dictated_rate(single, prompt, len(answer), None),
            "constrained": lambda _: dictated_rate(single, prompt, len(answer), order),
        },
    )
    return {"decode, tokens/s": decode, "one user's order, tokens/s": users}


# Servers.


def constrained(server: Server, schema: dict[str, Any]) -> Server:
    """Return the same server with requests for JSON of this schema."""
    more = {"structured_outputs": {"json": schema}, "stream_options": {"include_usage": True}}
    return replace(server, extra_body={**server.extra_body, **more}, extensions=False)


async def _ask(server: Server, writer: PromptWriter, rng: Random, users: int, tokens: int) -> list[RequestResult]:
    items = [WorkItem(writer.write(rng, CONTEXT), CONTEXT, tokens) for _ in range(users)]
    async with open_session(server) as session:
        results = await asyncio.gather(*(send(session, server, item, writer.count) for item in items))
    if error := next((result.error for result in results if result.error is not None), None):
        raise RuntimeError(error)
    return results


def first_token_ms(server: Server, writer: PromptWriter, what: str, seed: int) -> float:
    """Return the TTFT of a single user in milliseconds, for a prompt that is not cached."""
    [result] = uvloop.run(_ask(server, writer, Random(f"first {what} {seed}"), 1, 1))
    return 1e3 * (result.ttft_s or 0.0)


def users_rate(server: Server, writer: PromptWriter, users: int, what: str, seed: int) -> float:
    """Return the tokens per second of `users` concurrent users, uncached prompts included."""
    start = time.perf_counter()
    results = uvloop.run(_ask(server, writer, Random(f"{users} users {what} {seed}"), users, DECODED))
    return sum(result.output_tokens for result in results) / (time.perf_counter() - start)


def measure_server(server: Server, writer: PromptWriter, rounds: int) -> dict[str, Any]:
    """Return the figures of one server. TTFT is measured four times as often, since it is short."""
    known = constrained(server, thirty_fields(0))
    endless = constrained(server, ENDLESS)
    first: dict[str, Callable[[int], float]] = {
        "no schema": partial(first_token_ms, server, writer, "free"),
        "known schema": partial(first_token_ms, known, writer, "known"),
        "new schema": lambda seed: first_token_ms(constrained(server, thirty_fields(1 + seed)), writer, "new", seed),
    }
    found = {"first token, ms": _turns(4 * rounds, first)}
    for users in (1, ROWS):
        rates = {
            name: partial(users_rate, asked, writer, users, name)
            for name, asked in (("free", server), ("constrained", endless))
        }
        found[f"{users} users, tokens/s"] = _turns(rounds, rates)
    return found


app = typer.Typer(add_completion=False, help=__doc__)
Rounds = Annotated[int, typer.Option(min=1, help="Figures are medians over so many rounds.")]
Config = Annotated[Path, typer.Option(exists=True, help="The Serve config whose model and settings are used.")]
_CONFIG = Path("deploy/config.yaml")


@app.command(name="grammars")
def grammars_command(rounds: Rounds = 5, json_file: JsonFile = None) -> None:
    """Measure new schemas in this process."""
    _report({"grammars": measure_grammars(rounds)}, json_file)


@app.command()
def engine(config: Config = _CONFIG, rounds: Rounds = 5, json_file: JsonFile = None) -> None:
    """Measure the engine of the config's replicas in this process."""
    from serve_app.serving.engine_config import engine_config

    settings = Settings.model_validate(yaml.safe_load(config.read_text())["applications"][0]["args"])
    figures = measure_engine(engine_config(settings, use_gpu=False), load_tokenizer(settings.model), rounds)
    _report({"engine": figures}, json_file)


@app.command()
def servers(
    contestants: Annotated[
        str, typer.Option(help="Names of `load_tests.bench.peers`, separated by commas.")
    ] = "serve_app",
    folder: Annotated[Path, typer.Option("--peers", help="Folder of the peers.")] = Path("build/peers"),
    config: Config = _CONFIG,
    rounds: Rounds = 5,
    json_file: JsonFile = None,
) -> None:
    """Measure servers with vLLM's `structured_outputs`, one after another, each near its
    defaults."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    peers, names = PeerFolder(folder.absolute()), contestants.split(",")
    missing = set_up(peers, list(dict.fromkeys(need for name in names for need in CONTESTANTS[name].needs)))
    writer, figures = open_writer("default"), {}
    for name in names:
        command = CONTESTANTS[name].make(peers, config)
        if not isinstance(command, ServerCommand):
            raise typer.BadParameter(f"{name} is not a server", param_hint="--contestants")
        try:
            if reason := next((missing[need] for need in CONTESTANTS[name].needs if need in missing), None):
                raise RuntimeError(reason)
            with running(command, peers.path / f"{name}.log", 600.0):
                figures[name] = measure_server(reach(command.client(), writer), writer, rounds)
        except RuntimeError as error:
            figures[name] = {"failed": str(error)}
    _report(figures, json_file)


def _report(figures: dict[str, Any], json_file: Path | None) -> None:
    table = Table("contestant", "figure", "case", "median", "ratio to the first case")
    for name, found in figures.items():
        for figure, medians in found.items():
            rows = medians.items() if isinstance(medians, dict) else [(medians, {})]
            for what, row in rows:
                table.add_row(name, figure, what, *map(str, row.values()))
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n")


if __name__ == "__main__":
    app()
