"""`serve-app explain`: one packed step of a real run, for people who see continuous batching for the first time.

Decides the little scene: two requests are writing already when two more arrive, and the step's token budget is too
small for all of the last prompt. The drawing is in `packed_step`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from serve_app.cli.outputs import JsonFile, PngFile
from serve_app.cli.packed_step import PackedStep, draw_mask, draw_mask_png, draw_row, packed_step
from serve_app.core.output import StepRecord
from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.errors import ServeAppError

if TYPE_CHECKING:
    from serve_app.engine.core import EngineCore
    from serve_app.text.tokenizer import Tokenizer

EARLY = ("The capital of France is", "My favourite animal is the")
LATE = ("Water boils at a temperature of", "Once upon a time there was a little robot who wanted to learn how to paint")
BUDGET = 18
"""Tokens per step: two decodes, the whole first late prompt, and a part of the second."""
_INTRODUCTION = """\
A language model reads tokens and predicts the next one. Requests A and B were already writing their answers when C and
D arrived. Nobody waits for anybody: the engine lines up all tokens that are due, one after the other in a single row
without padding, and runs the model over that row once. Linear layers treat every token alike, so it does not matter
whose it is. Only attention must know: each token looks at its own request's tokens up to itself, never at others'.
"""
_DECODES_BEFORE, _MAX_TOKENS = 2, 12
_SEATS = 8


@dataclass(slots=True)
class Scene:
    """A run in the making: every request's tokens so far, and the last step's record."""

    engine: "EngineCore"
    records: list[StepRecord]
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def add(self, prompt: Sequence[int]) -> None:
        """Queue one more request; they are called A, B, C, ..."""
        request_id = chr(ord("A") + len(self.tokens))
        params = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS, ignore_eos=True)
        self.engine.add(EngineRequest(request_id, tuple(prompt), params))
        self.tokens[request_id] = list(prompt)

    def step(self) -> dict[str, list[int]]:
        """Run one step; returns the tokens that were known before it, which are those it computed with."""
        before = {request_id: list(ids) for request_id, ids in self.tokens.items()}
        for delta in self.engine.step() or []:
            self.tokens[delta.request_id].extend(delta.token_ids)
        return before


def run_scene(
    engine: "EngineCore", records: list[StepRecord], tokenizer: "Tokenizer", early: Sequence[str], late: Sequence[str]
) -> PackedStep:
    """Run `early` prompts until they decode, let the `late` ones join, and describe the step in which they do.

    `records` is the list that the engine's `on_step` fills.
    """
    scene = Scene(engine, records)
    for prompt in early:
        scene.add(tokenizer.encode(prompt))
    prompt_lengths = {request_id: len(ids) for request_id, ids in scene.tokens.items()}
    while any(len(ids) < prompt_lengths[request_id] + _DECODES_BEFORE for request_id, ids in scene.tokens.items()):
        scene.step()
    for prompt in late:
        scene.add(tokenizer.encode(prompt))
    known = scene.step()
    texts = {token_id: tokenizer.decode([token_id]) for ids in known.values() for token_id in ids}
    return packed_step(records[-1], known, texts)


def explain(
    model: Annotated[str, typer.Option(help='"default", a folder, a .gguf file or a hub id.')] = "default",
    budget: Annotated[int, typer.Option(min=_SEATS, help="Tokens that one step may compute.")] = BUDGET,
    kv_cache_gib: Annotated[float, typer.Option(min=0.001, help="Size of the KV pool.")] = 1.0,
    png: PngFile = None,
    json_file: JsonFile = None,
) -> None:
    """One packed step of a real run: whose tokens it computes, and what each may attend to."""
    console = Console()
    try:
        with Console(stderr=True).status("loading the model"):
            step = _run(model, budget, kv_cache_gib)
    except ServeAppError as error:
        console.print(f"[red]{error}")
        raise typer.Exit(1) from error
    show(console, step)
    if png is not None:
        draw_mask_png(png, step)
    if json_file is not None:
        json_file.write_text(json.dumps(step.to_json(), indent=1) + "\n")


def _run(model: str, budget: int, kv_cache_gib: float) -> PackedStep:
    from serve_app.engine.core import EngineConfig, EngineCore
    from serve_app.model.loader import ModelOptions
    from serve_app.text.tokenizer import load_tokenizer

    records: list[StepRecord] = []
    config = EngineConfig(
        model=ModelOptions(model=model),
        max_num_seqs=_SEATS,
        max_num_batched_tokens=budget,
        enable_prefix_cache=False,
        kv_cache_gib=kv_cache_gib,
        speculation="off",
    )
    engine = EngineCore.load(config, on_step=records.append)
    return run_scene(engine, records, load_tokenizer(model), EARLY, LATE)


def show(console: Console, step: PackedStep) -> None:
    """The explanation in the terminal."""
    figures = step.to_json()
    title = f"Step {step.step}: {step.num_tokens} tokens of {len(step.segments)} requests in one forward pass"
    console.print(f"\n[bold]{title}[/bold]\n\n{_INTRODUCTION}")
    console.print(
        f"[bold]The row[/bold]: {figures['num_decode_tokens']} tokens decode (one for each request that is writing), "
        f"{figures['num_prefill_tokens']} are prefill (prompts being read)"
    )
    console.print(draw_row(step))
    console.print("\n[bold]Who may look at what[/bold], a line per token, a column per key")
    console.print("█ yes, a key of this step   ▓ yes, a key from the KV cache, computed in an earlier step")
    console.print("[dim]░ no, later in the same request   · no, another request[/dim]\n")
    console.print(draw_mask(step), end="")
    console.print(
        f"\nThe blocks on the diagonal are all that is computed: {_pairs(step)} pairs of token and key, where one mask "
        f"over everybody's keys would have {step.num_tokens * sum(s.num_keys for s in step.segments)}."
    )


def _pairs(step: PackedStep) -> int:
    return sum(segment.start + index + 1 for segment in step.segments for index in range(len(segment.token_ids)))
