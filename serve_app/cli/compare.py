"""`serve-app compare`: what continuous batching buys, on the same requests with the same slots.

Decides which requests are compared and how the result is shown. The measuring is in `compare_runs`.
"""

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from serve_app.cli.compare_runs import CompareJob, Measurement, Mode, measure_in_process
from serve_app.cli.outputs import JsonFile, PngFile
from serve_app.errors import ServeAppError
from serve_app.observability.timeline import draw_png, draw_terminal

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
"""Output tokens of each prompt: short and long ones side by side, which is what makes static batches wait."""
_DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Without `auto`, which the engine and transformers would not read alike."""

Runner = Callable[[Mode, CompareJob, Callable[[int], None]], Measurement]


def make_job(
    tokenizer: "Tokenizer", prompts: Sequence[str], caps: Sequence[int], repeat: int, **fields: Any
) -> CompareJob:
    """The prompts in their order, `repeat` times, as token ids with their caps; `fields` are those of `CompareJob`."""
    ids = tuple(tuple(tokenizer.encode(prompt)) for prompt in prompts)
    return CompareJob(ids * repeat, tuple(caps) * repeat, **fields)


def run_all(job: CompareJob, console: Console, runner: Runner = measure_in_process) -> dict[Mode, Measurement]:
    """All three measurements, one after another, with a progress bar for each."""
    columns = TextColumn("{task.description:<14}"), BarColumn(), TextColumn("{task.completed}/{task.total} tokens")
    results = {}
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for mode in Mode:
            task = progress.add_task(mode.value, total=job.output_tokens)
            results[mode] = runner(mode, job, lambda tokens, task=task: progress.advance(task, tokens))  # type: ignore[misc]
    return results


def report(results: dict[Mode, Measurement]) -> dict[str, Any]:
    """The figures as plain data.

    agreement_with_padded: the share of continuous batching's output tokens that come before the first difference from
    the padded run of the same request.
    """
    figures: dict[str, Any] = {
        mode.value: {
            "steps": run.steps,
            "seconds": round(run.seconds, 3),
            "output_tokens": sum(len(output) for output in run.outputs),
            "tokens_per_s": round(run.tokens_per_s, 2),
        }
        for mode, run in results.items()
    }
    padded, static, continuous = (results[mode] for mode in Mode)
    return figures | {
        "speedup_vs_padded": round(continuous.tokens_per_s / padded.tokens_per_s, 3),
        "speedup_vs_packed": round(continuous.tokens_per_s / static.tokens_per_s, 3),
        "outputs_equal": static.outputs == continuous.outputs,
        "agreement_with_padded": round(_agreement(continuous.outputs, padded.outputs), 4),
    }


def _agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    same = 0
    for mine, other in zip(ours, theirs, strict=True):
        differs = (i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b)
        same += next(differs, len(mine))
    return same / max(1, sum(len(output) for output in ours))


def show(console: Console, job: CompareJob, results: dict[Mode, Measurement], groups: dict[str, int]) -> None:
    """Pictures, table and verdict in the terminal."""
    figures = report(results)
    columns = max(20, min(console.width, 140) - 10)
    scale = max(run.steps for run in results.values()) / columns
    console.print(f"\n{job.slots} slots; each character is {scale:.1f} steps; colours tell the prompts apart")
    console.print("[dim]▒ reads its prompt   ▇ decodes   ▃ less than half of the time   × padding   · idle[/dim]")
    for run in results.values():
        console.print(f"\n[bold]{run.timeline.title}")
        console.print(draw_terminal(run.timeline, groups, scale), end="")
    table = Table("", "steps", "seconds", "output tokens", "tokens/s", "slots doing wanted work")
    for column in table.columns[1:]:
        column.justify = "right"
    for mode, run in results.items():
        figure = figures[mode.value]
        table.add_row(
            mode.value,
            *(str(figure[key]) for key in ("steps", "seconds", "output_tokens", "tokens_per_s")),
            f"{run.timeline.useful_share:.0%}",
        )
    console.print("\n", table, sep="")
    padded, static, continuous = (results[mode] for mode in Mode)
    console.print(
        f"Continuous batching: {figures['speedup_vs_padded']:.2f}x the tokens per second of padded static batches, "
        f"{figures['speedup_vs_packed']:.2f}x those of packed static batches, "
        f"with {static.steps / continuous.steps:.2f}x fewer steps."
    )
    equal = sum(a == b for a, b in zip(static.outputs, continuous.outputs, strict=True))
    console.print(f"Packed static and continuous outputs: {equal} of {len(job.caps)} requests equal, token for token.")
    equal = sum(a == b for a, b in zip(padded.outputs, continuous.outputs, strict=True))
    console.print(
        f"Padded against continuous: {equal} of {len(job.caps)} requests equal; {figures['agreement_with_padded']:.1%} "
        "of the tokens come before a first difference (padding moves the last bits, so a near-tie may fall otherwise)."
    )
    console.print(f"Prefix cache in both packed runs: {'on' if job.prefix_cache else 'off'}.")


def compare(
    model: Annotated[str, typer.Option(help='"default", a folder, a .gguf file or a hub id.')] = "default",
    slots: Annotated[int, typer.Option(min=1, help="Requests at once, in all three runs.")] = 8,
    repeat: Annotated[int, typer.Option(min=1, help="How often the six prompts come, in their order.")] = 8,
    caps: Annotated[str, typer.Option(help="Output tokens of the six prompts.")] = ",".join(map(str, CAPS)),
    dtype: Annotated[str, typer.Option(help="Computing precision of all three runs.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default torch's choice.")] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Let the packed runs reuse the repeated prompts' blocks.")] = False,
    kv_cache_gib: Annotated[float, typer.Option(min=0.001, help="Size of the packed runs' KV pool.")] = 1.0,
    png: PngFile = None,
    json_file: JsonFile = None,
) -> None:
    """Static against continuous batching: same requests, same slots, measured and drawn."""
    from serve_app.text.tokenizer import load_tokenizer

    console = Console()
    try:
        lengths = _parse_caps(caps)
        if device not in ("auto", "cpu", "cuda"):
            raise typer.BadParameter(f"{device!r} is none of auto, cpu, cuda", param_hint="--device")
        if dtype not in _DTYPES:
            raise typer.BadParameter(f"{dtype!r} is none of {', '.join(_DTYPES)}", param_hint="--dtype")
        fields = {
            "slots": slots,
            "model": model,
            "dtype": dtype,
            "device": device,
            "prefix_cache": prefix_cache,
            "num_threads": threads,
            "kv_cache_gib": kv_cache_gib,
        }
        job = make_job(load_tokenizer(model), PROMPTS, lengths, repeat, **fields)
        results = run_all(job, Console(stderr=True))
    except ServeAppError as error:
        console.print(f"[red]{error}")
        raise typer.Exit(1) from error
    groups = {f"request-{index}": index % len(PROMPTS) for index in range(len(job.caps))}
    show(console, job, results, groups)
    if png is not None:
        draw_png(png, [run.timeline for run in results.values()], groups, [f"{cap} tokens out" for cap in lengths])
    if json_file is not None:
        json_file.write_text(json.dumps(report(results), indent=1) + "\n")


def _parse_caps(text: str) -> tuple[int, ...]:
    try:
        caps = tuple(int(part) for part in text.split(","))
    except ValueError:
        caps = ()
    if len(caps) != len(PROMPTS) or min(caps) < 1:
        raise typer.BadParameter(f"{text!r} is not {len(PROMPTS)} positive numbers", param_hint="--caps")
    return caps
