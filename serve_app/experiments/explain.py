"""Explains one packed step of a real run to readers new to continuous batching.

Decides the scene: two requests are decoding when two more arrive, and the step's token budget is
too small for all of the last prompt. Explains that step or any other step of the run. `packed_step`
draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.step_record import StepRecord
from serve_app.errors import InvalidRequestError
from serve_app.experiments.packed_step import PackedStep, draw_mask, draw_row, packed_step

if TYPE_CHECKING:
    from serve_app.engine.core import EngineCore
    from serve_app.text.tokenizer import Tokenizer

EARLY = ("The capital of France is", "My favourite animal is the")
LATE = ("Water boils at a temperature of", "Once upon a time there was a little robot who wanted to learn how to paint")
BUDGET = 18
"""Tokens per step: two decodes, all of the first late prompt, and part of the second."""
FIRST, MIXED = "first", "mixed"
"""Names of the first step of the run and of the first with tokens of C and D. Other steps are
numbered from 0.
"""
_INTRODUCTION = """
A language model reads tokens and predicts the next one. Requests A and B arrive first and are already generating their
answers when C and D arrive. No request waits for another: the engine packs all tokens that are due into a single row,
one after the other and without padding, and runs the model over that row once. Linear layers treat every token alike,
so it does not matter which request a token belongs to. Only attention distinguishes them: each token attends to the
tokens of its own request up to itself, and never to those of another request.
"""
_DECODES_BEFORE, _MAX_TOKENS = 2, 12
MAX_NUM_SEQS = 8


@dataclass(slots=True)
class Scene:
    """A run in progress: the step records and every request's tokens so far."""

    engine: "EngineCore"
    records: list[StepRecord]
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def add(self, prompt: Sequence[int]) -> None:
        """Queue another request. Requests are named A, B, C, ..."""
        request_id = chr(ord("A") + len(self.tokens))
        params = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS, ignore_eos=True)
        self.engine.add(EngineRequest(request_id, tuple(prompt), params))
        self.tokens[request_id] = list(prompt)

    def step(self) -> dict[str, list[int]]:
        """Run one step. Return each request's tokens before the step, which include those the step
        computed.
        """
        before = {request_id: list(ids) for request_id, ids in self.tokens.items()}
        for delta in self.engine.step() or []:
            self.tokens[delta.request_id].extend(delta.token_ids)
        return before


def run_scene(
    engine: "EngineCore",
    records: list[StepRecord],
    tokenizer: "Tokenizer",
    early: Sequence[str],
    late: Sequence[str],
    wanted: str = MIXED,
) -> PackedStep:
    """Run the `early` prompts until they decode, add the `late` ones, and return the wanted step.

    `records`: the list that the engine's `on_step` fills. Raises `InvalidRequestError` if the run
    has no such step.
    """
    scene = Scene(engine, records)
    for prompt in early:
        scene.add(tokenizer.encode(prompt))
    enough = {request_id: len(ids) + _DECODES_BEFORE for request_id, ids in scene.tokens.items()}
    late_came = False
    while engine.has_unfinished:
        name = FIRST if not records else str(len(records))
        if not late_came and all(len(scene.tokens[request_id]) >= count for request_id, count in enough.items()):
            late_came, name = True, MIXED
            for prompt in late:
                scene.add(tokenizer.encode(prompt))
        number = str(len(records))
        known = scene.step()
        if wanted in (name, number):
            texts = {token_id: tokenizer.decode([token_id]) for ids in known.values() for token_id in ids}
            return packed_step(records[-1], known, texts)
    raise InvalidRequestError(f"step {wanted} does not exist; the run has steps 0 to {len(records) - 1}", param="step")


def run(model: str, budget: int, kv_cache_gib: float, wanted: str = MIXED) -> PackedStep:
    """Load the model and run the scene; see `run_scene`. Raises `ServeAppError` if the model cannot
    be loaded.
    """
    from serve_app.engine.core import EngineConfig, EngineCore
    from serve_app.model.options import ModelOptions
    from serve_app.text.tokenizer import load_tokenizer

    records: list[StepRecord] = []
    config = EngineConfig(
        model=ModelOptions(model=model),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=budget,
        enable_prefix_cache=False,
        kv_cache_gib=kv_cache_gib,
        speculation="off",
    )
    engine = EngineCore.load(config, on_step=records.append)
    return run_scene(engine, records, load_tokenizer(model), EARLY, LATE, wanted)


def show(console: Console, step: PackedStep) -> None:
    """Print the explanation."""
    figures = step.to_json()
    title = f"Step {step.step}: {step.num_tokens} tokens of {len(step.segments)} requests in one forward pass"
    console.print(f"\n[bold]{title}[/bold]\n\n{' '.join(_INTRODUCTION.split())}\n")
    console.print(
        f"[bold]The row[/bold]: {figures['num_decode_tokens']} decode tokens (one for each generating request) and "
        f"{figures['num_prefill_tokens']} prefill tokens (of prompts)"
    )
    console.print(draw_row(step))
    console.print("\n[bold]The attention mask[/bold]: a line per token, a column per key")
    console.print("█ yes, a key of this step   ▓ yes, a key from the KV cache, computed in an earlier step")
    console.print("[dim]░ no, later in the same request   · no, another request[/dim]\n")
    console.print(draw_mask(step), end="")
    console.print(
        f"\nOnly the blocks on the diagonal are computed: {_pairs(step)} pairs of token and key. One dense mask over "
        f"all requests' keys would have {step.num_tokens * sum(s.num_keys for s in step.segments)}."
    )


def _pairs(step: PackedStep) -> int:
    return sum(segment.start + index + 1 for segment in step.segments for index in range(len(segment.token_ids)))
