"""A workload's requests without a server: our engine, OpenVINO GenAI's, and batched `generate`.

    python -m load_tests.bench.offline engine   --workloads decode,single --json FILE
    python -m load_tests.bench.offline openvino --workloads decode --gguf FILE --json FILE
    python -m load_tests.bench.offline generate --workloads decode --json FILE

`engine` runs a replica's engine on token ids in this process: the difference to `peers` is the cost
of HTTP and Ray. `openvino` runs an engine without a server in the same loop. `generate` is the
usual first attempt at batching: static padded batches of 16.
"""

import gc
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
import yaml

from load_tests.bench.step_runner import StepOutput, step_runner
from serve_app.cli.outputs import JsonFile
from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.engine.core import EngineCore
from serve_app.experiments.padded import PaddedGenerator
from serve_app.settings import Settings
from serve_app.workloads.client import RequestResult, Run
from serve_app.workloads.mixes import WorkItem, Workload, build_workload, read_names
from serve_app.workloads.prompts import PromptWriter, open_writer
from serve_app.workloads.runs import OnDone, Runner, measure

BATCH_SIZE = 16

app = typer.Typer(add_completion=False, help=__doc__)

Workloads = Annotated[str, typer.Option(help="Names, separated by commas; name:count for another number of requests.")]
Repeat = Annotated[int, typer.Option(help="Seed of the texts; the lengths are the same in all repeats.")]
WaitQuiet = Annotated[float, typer.Option(help="Wait at most this many seconds for a quiet machine.")]


class OurEngine:
    """The engine of a replica."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def add(self, number: int, prompt: Sequence[int], item: WorkItem) -> None:
        sampling = item.sampling
        params = SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, max_tokens=item.output_tokens, ignore_eos=True
        )
        self._core.add(EngineRequest(str(number), tuple(prompt), params))

    def step(self) -> Iterable[StepOutput]:
        for delta in self._core.step() or ():
            error = None if delta.error is None else delta.error.message
            yield StepOutput(int(delta.request_id), len(delta.token_ids), delta.finish_reason is not None, error)


def generate_runner(generator: PaddedGenerator, writer: PromptWriter) -> Runner:
    """Return a runner of batches of at most 16, in the workload's order.

    If users take turns, a batch is one turn of each. Tokens arrive when their batch ends, so there
    are no latencies.
    """

    def run(workload: Workload, on_done: OnDone) -> Run:
        prompts = [tuple(writer.ids(item.prompt)) for item in workload.items]
        caps = [item.output_tokens for item in workload.items]
        cpu = time.process_time()
        (sampling,) = {item.sampling for item in workload.items}
        batch_size = min(BATCH_SIZE, workload.concurrency or BATCH_SIZE)
        done = generator.run(prompts, caps, batch_size, sampling=sampling.for_transformers)
        results = [
            RequestResult(item, output_tokens=len(output), e2e_s=done.seconds)
            for item, output in zip(workload.items, done.outputs, strict=True)
        ]
        for result in results:
            on_done(result)
        return Run(workload, tuple(results), done.seconds, time.process_time() - cpu)

    return run


def _report(
    run: Runner,
    writer: PromptWriter,
    workloads: str,
    repeat: int,
    wait_quiet_s: float,
    json_file: Path | None,
) -> None:
    run(build_workload("decode", writer, repeat=repeat, salt="warm-up", num_requests=2), lambda _: None)
    # as a server's process does: what a load leaves behind is visited by no later collection
    gc.freeze()
    figures = {}
    for name, count in read_names(workloads).items():
        workload = build_workload(name, writer, repeat=repeat, num_requests=count)
        figures[name] = measure(run, workload, name, server_pid=os.getpid(), quiet_limit_s=wait_quiet_s)
    text = json.dumps(figures, indent=1)
    print(text)
    if json_file is not None:
        json_file.write_text(text + "\n")


def _read_settings(config: Path) -> Settings:
    """Return the settings of the config's application, read without Ray."""
    return Settings.model_validate(yaml.safe_load(config.read_text())["applications"][0]["args"])


@app.command()
def engine(
    workloads: Workloads = "decode",
    config: Annotated[Path, typer.Option(help="The Serve config whose engine settings are used.")] = Path(
        "deploy/config.yaml"
    ),
    repeat: Repeat = 0,
    wait_quiet: WaitQuiet = 0.0,
    json_file: JsonFile = None,
) -> None:
    """Run the requests in this process through the engine of the config's replicas."""
    from serve_app.serving.engine_config import engine_config

    settings = _read_settings(config)
    writer = open_writer(settings.model)
    core = EngineCore.load(engine_config(settings, use_gpu=False))
    _report(step_runner(OurEngine(core), writer), writer, workloads, repeat, wait_quiet, json_file)


@app.command()
def openvino(
    gguf: Annotated[Path, typer.Option(help="The default model as a GGUF file that OpenVINO GenAI reads.")],
    workloads: Workloads = "decode",
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences at once; by default what OpenVINO GenAI chooses.")
    ] = None,
    repeat: Repeat = 0,
    wait_quiet: WaitQuiet = 0.0,
    json_file: JsonFile = None,
) -> None:
    """Run the requests in this process through OpenVINO GenAI, whose packages must be on
    the path."""
    from load_tests.bench.openvino_engine import OpenVinoEngine

    writer = open_writer("default")
    _report(step_runner(OpenVinoEngine(gguf, max_num_seqs), writer), writer, workloads, repeat, wait_quiet, json_file)


@app.command()
def generate(
    workloads: Workloads = "decode",
    config: Annotated[Path, typer.Option(help="The Serve config whose model is used.")] = Path("deploy/config.yaml"),
    repeat: Repeat = 0,
    wait_quiet: WaitQuiet = 0.0,
    json_file: JsonFile = None,
) -> None:
    """Run the requests through `model.generate` in float32, in static padded batches of 16."""
    settings = _read_settings(config)
    writer = open_writer(settings.model)
    run = generate_runner(PaddedGenerator(settings.model, "float32", "cpu"), writer)
    _report(run, writer, workloads, repeat, wait_quiet, json_file)


if __name__ == "__main__":
    app()
