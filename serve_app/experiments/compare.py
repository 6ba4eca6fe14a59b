"""Compares continuous batching with other ways to batch: the same requests, the same slots.

Decides which requests are compared and how results are shown. `compare_runs` measures.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from serve_app.errors import InvalidRequestError
from serve_app.experiments.compare_runs import CompareJob, Measurement, Mode, OnTokens, measure_in_process
from serve_app.experiments.padding import draw_copies, draw_held, padding_figures
from serve_app.observability.timeline import Work, draw_png, draw_terminal

if TYPE_CHECKING:
    from serve_app.text.tokenizer import Tokenizer

PROMPTS = (
    "The capital of France is",
    "Write a short note to a colleague who asks how a steam engine works. Begin with the boiler.",
    "Once upon a time, in a village between two rivers, there lived a clockmaker who",
    "List three things that a good library needs:",
    "Explain to a child why the sky is blue during the day and red in the evening, step by step, with an example.",
    "Dear Sir or Madam, I am writing to you because",
)
CAPS = (6, 50, 300, 30, 180, 45)
"""Output tokens of each prompt. Short and long requests alternate, so static batches have to wait.
"""

Runner = Callable[[Mode, CompareJob, OnTokens], Measurement]


def make_job(
    tokenizer: "Tokenizer", prompts: Sequence[str], caps: Sequence[int], repeat: int, **fields: Any
) -> CompareJob:
    """Encode the prompts and repeat them with their caps `repeat` times. `fields`: fields of
    `CompareJob`.
    """
    ids = tuple(tuple(tokenizer.encode(prompt)) for prompt in prompts)
    return CompareJob(ids * repeat, tuple(caps) * repeat, **fields)


def read_requests(path: Path) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Read prompts and output tokens from a JSONL file. Each line is an object with `prompt` and
    `max_tokens`.

    Raises `InvalidRequestError` with the number of the first invalid line.
    """
    prompts, caps = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
            prompt, cap = body["prompt"], body["max_tokens"]
        except (ValueError, KeyError, TypeError):
            prompt = cap = None
        if not (isinstance(prompt, str) and prompt and type(cap) is int and cap >= 1):
            raise InvalidRequestError(
                f"{path}, line {number}: must be an object with `prompt`, a text, and `max_tokens`, at least 1"
            )
        prompts.append(prompt)
        caps.append(cap)
    if not prompts:
        raise InvalidRequestError(f"{path} has no requests")
    return tuple(prompts), tuple(caps)


@contextmanager
def token_progress(console: Console) -> Iterator[Callable[[str, int], OnTokens]]:
    """Show progress bars. Yields a function that starts a bar for a total number of tokens and
    returns a function to advance it.
    """
    columns = TextColumn("{task.description:<17}"), BarColumn(), TextColumn("{task.completed}/{task.total} tokens")
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:

        def begin(name: str, total: int) -> OnTokens:
            task = progress.add_task(name, total=total)
            return lambda tokens: progress.advance(task, tokens)

        yield begin


def run_all(job: CompareJob, console: Console, runner: Runner = measure_in_process) -> dict[Mode, Measurement]:
    """Run all measurements one after another, with a progress bar for each."""
    results = {}
    with token_progress(console) as begin:
        for mode in Mode:
            results[mode] = runner(mode, job, begin(mode.value, job.output_tokens))
    return results


def report(results: dict[Mode, Measurement]) -> dict[str, Any]:
    """Return the figures as plain data.

    agreement_with_padded, agreement_with_padded_continuous: the share of continuous batching's
    output tokens before the first difference from the padded (or padded continuous) run's output of
    the same request.
    """
    figures: dict[str, Any] = {
        mode.value: {
            "steps": run.steps,
            "seconds": round(run.seconds, 3),
            "output_tokens": sum(len(output) for output in run.outputs),
            "tokens_per_s": round(run.tokens_per_s, 2),
            "computed_positions": run.positions,
        }
        | (padding_figures(run.padding) if run.padding else {})
        for mode, run in results.items()
    }
    padded, static, merged, continuous = (results[mode] for mode in Mode)
    return figures | {
        "speedup_vs_padded": round(continuous.tokens_per_s / padded.tokens_per_s, 3),
        "speedup_vs_packed": round(continuous.tokens_per_s / static.tokens_per_s, 3),
        "speedup_vs_padded_continuous": round(continuous.tokens_per_s / merged.tokens_per_s, 3),
        "outputs_equal": static.outputs == continuous.outputs,
        "agreement_with_padded": round(agreement(continuous.outputs, padded.outputs), 4),
        "agreement_with_padded_continuous": round(agreement(continuous.outputs, merged.outputs), 4),
    }


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Return the share of our output tokens before the first difference from their output of the
    same request.
    """
    same = 0
    for mine, other in zip(ours, theirs, strict=True):
        differs = (i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b)
        same += next(differs, len(mine))
    return same / max(1, sum(len(output) for output in ours))


def show(console: Console, job: CompareJob, results: dict[Mode, Measurement], groups: dict[str, int]) -> None:
    """Print timelines, table and conclusions."""
    figures = report(results)
    columns = max(20, min(console.width, 140) - 10)
    scale = max(run.steps for run in results.values()) / columns
    console.print(f"\n{job.slots} slots; each character is {scale:.1f} steps; one colour per prompt")
    console.print("[dim]▒ prefill   ▇ decode   ▃ decode in less than half of the time   × padding   · idle[/dim]")
    for run in results.values():
        console.print(f"\n[bold]{run.timeline.title}")
        console.print(draw_terminal(run.timeline, groups, scale), end="")
    table = Table("", "steps", "positions", "seconds", "output tokens", "tokens/s", "useful work in slots")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for mode, run in results.items():
        figure = figures[mode.value]
        table.add_row(
            mode.value,
            *(str(figure[key]) for key in ("steps", "computed_positions", "seconds", "output_tokens", "tokens_per_s")),
            f"{run.timeline.useful_share:.0%}",
        )
    console.print("\n", table, sep="")
    padded, static, merged, continuous = (results[mode] for mode in Mode)
    console.print(
        f"Continuous batching: {figures['speedup_vs_padded']:.2f}x the tokens per second of padded static batches, "
        f"{figures['speedup_vs_packed']:.2f}x those of packed static batches, "
        f"{figures['speedup_vs_padded_continuous']:.2f}x those of padded continuous ones, "
        f"with {static.steps / continuous.steps:.2f}x fewer steps than static ones."
    )
    copied = figures[Mode.PADDED_CONTINUOUS.value]
    console.print(
        f"Padded continuous copied {copied['appended_mib']:,.1f} MiB of keys and values to append columns and "
        f"{copied['moved_mib']:,.1f} MiB to merge and filter; {copied['padding_share_of_cache']:.0%} of what its cache "
        "held was padding. Packed batches copy and pad nothing."
    )
    equal = _num_equal(static, continuous)
    console.print(f"Packed static and continuous outputs: {equal} of {len(job.caps)} requests equal, token for token.")
    for name, run, key in (("Padded", padded, ""), ("Padded continuous", merged, "_continuous")):
        console.print(
            f"{name} against continuous: {_num_equal(run, continuous)} of {len(job.caps)} requests equal; "
            f"{figures['agreement_with_padded' + key]:.1%} of the tokens come before the first difference "
            "(padding changes the last bits, which can decide a near-tie)."
        )
    console.print(f"Prefix cache in both packed runs: {'on' if job.prefix_cache else 'off'}.")


def show_events(console: Console, results: dict[Mode, Measurement]) -> None:
    """Print continuous batching line by line: the steps in which requests take and leave their
    slots.
    """
    console.print("\n[bold]Continuous: ++ takes a slot, -- leaves it[/bold]; steps are counted from 0")
    for line in events(results[Mode.CONTINUOUS]):
        console.print(line, markup=False, highlight=False)


def events(run: Measurement) -> list[str]:
    """Return admissions and ends by step. Ends come last in a step: those requests ran in it."""
    moments: list[tuple[int, int, int, str]] = []
    stays: dict[str, tuple[int, int, int]] = {}
    for span in run.timeline.spans:
        if span.work is not Work.WASTED:
            _, first, last = stays.get(span.request_id, (span.slot, span.start, 0))
            stays[span.request_id] = span.slot, min(first, span.start), max(last, span.stop - 1)
    for request_id, (slot, first, last) in stays.items():
        name = request_id.replace("-", " ")
        moments.append((first, 0, slot, f"++ [step {first}] slot {slot} <- {name}"))
        moments.append((last, 1, slot, f"-- [step {last}] slot {slot} -> {name}, after {last - first + 1} steps"))
    return [line for *_, line in sorted(moments)]


def _num_equal(a: Measurement, b: Measurement) -> int:
    return sum(mine == other for mine, other in zip(a.outputs, b.outputs, strict=True))


def draw(path: Path, results: dict[Mode, Measurement], groups: dict[str, int], group_labels: Sequence[str]) -> None:
    """Write a PNG with all timelines and the cost of padding. Overwrites an existing file."""
    steps = results[Mode.PADDED_CONTINUOUS].padding
    more = [partial(draw_held, steps=steps), partial(draw_copies, steps=steps)]
    draw_png(path, [run.timeline for run in results.values()], groups, group_labels, more)
