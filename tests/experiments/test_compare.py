"""`serve-app compare` on a tiny model in float64, where no near-tie can decide: counts, equality
and figures."""

import heapq
import json
import shutil
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from serve_app.cli import app
from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.errors import InvalidRequestError, ServeAppError
from serve_app.experiments.compare import CAPS, PROMPTS, events, make_job, read_requests, report, run_all, show
from serve_app.experiments.compare_runs import CompareJob, Measurement, Mode, measure, measure_in_process
from serve_app.experiments.padded import PaddedGenerator, load_causal_lm
from serve_app.experiments.padded_continuous import PaddedContinuousEngine
from serve_app.experiments.padding import PaddedStep
from serve_app.observability.timeline import Timeline, Work
from serve_app.text.tokenizer import load_tokenizer
from tests.cli.conftest import CONTEXT

TINY_CAPS = (1, 2, 5, 3, 4, 2)
SLOTS, REPEAT = 4, 2
CAPS_IN_ORDER = TINY_CAPS * REPEAT


def static_steps(caps: tuple[int, ...], slots: int) -> int:
    """Every batch runs to its longest output."""
    return sum(max(caps[first : first + slots]) for first in range(0, len(caps), slots))


def continuous_steps(caps: tuple[int, ...], slots: int) -> int:
    """Each request takes the slot that falls free first."""
    free_at = [0] * slots
    for cap in caps:
        heapq.heapreplace(free_at, free_at[0] + cap)
    return max(free_at)


def merged_steps(caps: tuple[int, ...], slots: int) -> int:
    """Newcomers take a step of their own, in which the others pause."""
    waiting, running, steps = list(caps), [], 0
    while waiting or running:
        if free := min(slots - len(running), len(waiting)):
            newcomers, waiting = waiting[:free], waiting[free:]
            running += [cap - 1 for cap in newcomers]
        else:
            running = [left - 1 for left in running]
        running = [left for left in running if left]
        steps += 1
    return steps


@pytest.fixture(scope="module")
def job(tiny_folder: Path) -> CompareJob:
    fields = {"slots": SLOTS, "model": str(tiny_folder), "dtype": "float64", "device": "cpu", "num_threads": 1}
    fields |= {"kv_cache_gib": 0.02}
    return make_job(load_tokenizer(str(tiny_folder)), PROMPTS, TINY_CAPS, REPEAT, **fields)


@pytest.fixture(scope="module")
def results(job: CompareJob) -> dict[Mode, Measurement]:
    return run_all(job, Console(file=StringIO()), runner=measure)


def test_steps_are_exactly_what_the_ways_of_batching_imply(results: dict[Mode, Measurement]) -> None:
    static = static_steps(CAPS_IN_ORDER, SLOTS)
    continuous = continuous_steps(CAPS_IN_ORDER, SLOTS)
    assert (static, continuous) == (14, 9)
    assert [results[mode].steps for mode in Mode] == [static, static, merged_steps(CAPS_IN_ORDER, SLOTS), continuous]


def test_the_default_caps_leave_static_batches_twice_the_steps() -> None:
    caps = CAPS * 8
    assert static_steps(caps, 8) == 1800
    assert static_steps(caps, 8) >= 2 * continuous_steps(caps, 8)


def test_all_give_the_same_tokens_of_the_wanted_lengths(results: dict[Mode, Measurement]) -> None:
    for run in results.values():
        assert [len(output) for output in run.outputs] == list(CAPS_IN_ORDER)
    assert len({run.outputs for run in results.values()}) == 1
    assert len(set(results[Mode.CONTINUOUS].outputs)) == len(PROMPTS), "the prompts must not all answer alike"


def test_the_report_has_exactly_the_promised_keys(results: dict[Mode, Measurement]) -> None:
    figures = report(results)
    assert list(figures) == [
        "static_padded",
        "static_packed",
        "continuous_padded",
        "continuous",
        "speedup_vs_padded",
        "speedup_vs_packed",
        "speedup_vs_padded_continuous",
        "outputs_equal",
        "agreement_with_padded",
        "agreement_with_padded_continuous",
    ]
    for mode in Mode:
        keys = ["steps", "seconds", "output_tokens", "tokens_per_s", "computed_positions"]
        if mode is Mode.PADDED_CONTINUOUS:
            keys += ["padding_share_of_cache", "appended_mib", "moved_mib"]
        assert list(figures[mode]) == keys
        assert figures[mode]["output_tokens"] == sum(CAPS_IN_ORDER)
        assert figures[mode]["tokens_per_s"] == pytest.approx(sum(CAPS_IN_ORDER) / results[mode].seconds, rel=1e-3)
    assert figures["outputs_equal"] is True
    assert figures["agreement_with_padded"] == figures["agreement_with_padded_continuous"] == 1.0


def test_pictures_show_padding_only_where_there_is_some(results: dict[Mode, Measurement]) -> None:
    wanted = sum(CAPS_IN_ORDER)
    for mode, run in results.items():
        cells = {work: 0 for work in Work}
        for span in run.timeline.spans:
            cells[span.work] += span.stop - span.start
        assert cells[Work.PREFILL] == len(CAPS_IN_ORDER)
        assert cells[Work.PREFILL] + cells[Work.DECODE] == wanted
        assert cells[Work.WASTED] == (SLOTS * run.steps - wanted if mode is Mode.PADDED else 0)


def fabricated(mode: Mode, outputs: tuple[tuple[int, ...], ...], seconds: float) -> Measurement:
    padding = (PaddedStep(4, 2, 8, 6, 0, 2**20),) if mode is Mode.PADDED_CONTINUOUS else ()
    return Measurement(mode, outputs, seconds, 4, 6, Timeline("t", 2, 4, ()), padding)


def test_differences_are_reported_not_hidden() -> None:
    ours = ((1, 2, 3, 4), (5, 6))
    padded = ((1, 2, 9, 4), (5, 6))
    results = {
        Mode.PADDED: fabricated(Mode.PADDED, padded, 6.0),
        Mode.STATIC: fabricated(Mode.STATIC, padded, 3.0),
        Mode.PADDED_CONTINUOUS: fabricated(Mode.PADDED_CONTINUOUS, padded, 4.0),
        Mode.CONTINUOUS: fabricated(Mode.CONTINUOUS, ours, 2.0),
    }
    figures = report(results)
    assert figures["outputs_equal"] is False
    assert figures["agreement_with_padded"] == pytest.approx(4 / 6, abs=1e-4)
    assert (figures["speedup_vs_padded"], figures["speedup_vs_packed"]) == (3.0, 1.5)
    output = StringIO()
    show(Console(file=output, width=100), CompareJob(((1,), (1,)), (4, 2), 2), results, {})
    assert "1 of 2 requests equal, token for token" in output.getvalue()
    assert "1.0 MiB to merge and filter; 25% of" in " ".join(output.getvalue().split())
    assert "Prefix cache in both packed runs: off" in output.getvalue()


@pytest.mark.wide
def test_the_command_end_to_end(tiny_folder: Path, tmp_path: Path) -> None:
    """In fresh processes, as users run it."""
    png, json_file = tmp_path / "out.png", tmp_path / "out.json"
    requests = tmp_path / "requests.jsonl"
    lines = [{"prompt": prompt, "max_tokens": cap} for prompt, cap in zip(PROMPTS, TINY_CAPS, strict=True)]
    requests.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    options = ["--model", str(tiny_folder), "--slots", "4", "--repeat", "2", "--requests", str(requests), "--events"]
    options += [
        "--dtype",
        "float64",
        "--device",
        "cpu",
        "--threads",
        "1",
        "--kv-cache-gib",
        "0.02",
        "--png",
        str(png),
        "--json",
        str(json_file),
    ]
    result = CliRunner().invoke(app, ["compare", *options])
    assert result.exit_code == 0, result.output
    figures = json.loads(json_file.read_text())
    assert [figures[mode]["steps"] for mode in Mode] == [14, 14, 13, 9]
    assert figures["outputs_equal"] is True
    assert "Continuous: a freed slot" in result.output
    assert "12 of 12 requests equal, token for token" in result.output
    assert "++ [step 1] slot 0 <- request 4" in result.output
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_childs_failure_is_told_in_one_line(job: CompareJob) -> None:
    too_long = CompareJob(
        ((5,) * (CONTEXT + 1),), (4,), 1, job.model, job.dtype, job.device, num_threads=1, kv_cache_gib=0.02
    )
    with pytest.raises(ServeAppError, match=f"continuous: ContextLengthError: .*{CONTEXT}"):
        measure_in_process(Mode.CONTINUOUS, too_long, lambda _: None)


def test_the_baseline_reads_no_pickled_weights(tiny_folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        shutil.copy(tiny_folder / name, tmp_path)
    torch.save(load_file(tiny_folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        PaddedGenerator(str(tmp_path), "float32", "cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--caps", "1,2"], "is not a list of 6 positive numbers"),
        (["--prompt", "a", "--prompt", "b"], "is not a list of 2 positive numbers"),
        (["--prompt", "a", "--requests", __file__], "cannot be combined with --requests"),
        (["--requests", "/no/such/file"], "/no/such/file"),
        (["--requests", __file__], "line 1: must be an object with `prompt`, a text, and `max_tokens`"),
        (["--caps", "1,2,3,4,5,x"], "is not a list of 6 positive numbers"),
        (["--caps", "1,2,3,4,5,0"], "is not a list of 6 positive numbers"),
        (["--device", "tpu"], "not one of auto, cpu, cuda"),
        (["--dtype", "auto"], "'auto' is not one of float32, bfloat16, float16, float64"),
        (["--slots", "0"], "--slots"),
        (["--json", "/no/such/folder/file"], "cannot be written"),
        (["--png", "/"], "is a folder"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_wrong_options_are_refused(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["compare", *options], env={"COLUMNS": "200"})
    assert result.exit_code != 0
    assert message in result.output


def test_only_padding_computes_more_than_was_asked_for(job: CompareJob, results: dict[Mode, Measurement]) -> None:
    wanted = sum(len(prompt) + cap - 1 for prompt, cap in zip(job.prompts, job.caps, strict=True))
    assert results[Mode.STATIC].positions == results[Mode.CONTINUOUS].positions == wanted
    merged = results[Mode.PADDED_CONTINUOUS]
    assert sum(step.wanted for step in merged.padding) == wanted
    assert results[Mode.PADDED].positions > merged.positions > wanted, "finished rows compute nothing when filtered"


def test_merging_and_filtering_copy_what_they_keep(tiny_folder: Path) -> None:
    """Prompts of 2 and 4 tokens, two slots: the cache holds 2 x columns, and after a row's end what
    is left of it."""
    steps: list[PaddedStep] = []
    engine = PaddedContinuousEngine(load_causal_lm(str(tiny_folder), "float64", "cpu"), 2, lambda _: None, steps.append)
    for name, prompt, cap in (("a", (5, 6), 3), ("b", (7, 8, 9, 10), 2), ("c", (11,), 1)):
        engine.add(EngineRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=cap, ignore_eos=True)))
    while engine.has_unfinished:
        engine.step()
    column = 2 * 2 * 16 * 8 * 2  # 2 layers, 2 heads of 16 numbers in 8 bytes, keys and values
    assert [(step.computed, step.wanted) for step in steps] == [(8, 6), (2, 2), (1, 1), (1, 1)]
    assert [(step.held, step.used) for step in steps] == [(8, 6), (10, 8), (6, 4), (4, 4)]
    assert [step.appended_bytes // column for step in steps] == [0, 8, 0, 3]
    # b ends: a's row is copied, without the two columns of padding. c joins (2 rows of 3), and ends
    # at once.
    assert [step.moved_bytes // column for step in steps] == [0, 3, 6 + 3, 0]


def test_events_tell_who_took_and_left_which_slot(results: dict[Mode, Measurement]) -> None:
    """Caps 1, 2, 5, 3, 4, 2 twice in 4 slots: the first request ends in the step in which it
    came."""
    lines = events(results[Mode.CONTINUOUS])
    assert len(lines) == 2 * len(CAPS_IN_ORDER)
    assert lines[:4] == [f"++ [step 0] slot {slot} <- request {slot}" for slot in range(4)]
    assert lines[4:8] == [
        "-- [step 0] slot 0 -> request 0, after 1 steps",
        "++ [step 1] slot 0 <- request 4",
        "-- [step 1] slot 1 -> request 1, after 2 steps",
        "++ [step 2] slot 1 <- request 5",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "has no requests"),
        ("{", "line 1: must be an object"),
        ("[1]", "line 1: must be an object"),
        ('{"prompt": "a", "max_tokens": 1}\n{"prompt": "b"}', "line 2: must be an object"),
        ('{"prompt": "a", "max_tokens": 0}', "line 1: must be an object"),
        ('{"prompt": "a", "max_tokens": true}', "line 1: must be an object"),
        ('{"prompt": "", "max_tokens": 1}', "line 1: must be an object"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(line)
    with pytest.raises(InvalidRequestError, match=message):
        read_requests(path)
