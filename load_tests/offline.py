"""The requests of a workload without a server: through our engine alone, and through batched `generate`.

    python -m load_tests.offline engine   --workloads decode,single --json FILE
    python -m load_tests.offline generate --workloads decode --json FILE

`engine` shows what HTTP and Ray cost: the same engine as in a replica, fed with token ids in this process. `generate`
is batching as everybody's first script has it: static padded waves of 16. Sends nothing over HTTP (see `peers`).
"""

import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Annotated

import typer
import yaml

from load_tests.bench import OnDone, Runner, measure
from load_tests.client import RequestResult, Run
from load_tests.workloads import PromptWriter, Workload, build_workload, open_writer, read_names
from serve_app.cli.outputs import JsonFile
from serve_app.cli.padded import PaddedGenerator
from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.engine.core import EngineCore
from serve_app.settings import Settings

BATCH_SIZE = 16

app = typer.Typer(add_completion=False, help=__doc__)

Workloads = Annotated[str, typer.Option(help="Names, separated by commas; name:count for fewer.")]
Repeat = Annotated[int, typer.Option(help="Decides the texts; requests of another repeat have the same lengths.")]
WaitQuiet = Annotated[float, typer.Option(help="Wait up to so many seconds for a quiet machine.")]


def engine_runner(core: EngineCore, writer: PromptWriter) -> Runner:
    """Feeds the engine, at most `concurrency` requests at once; a request's clock starts when the engine gets it."""

    def run(workload: Workload, on_done: OnDone) -> Run:
        prompts = [tuple(writer.tokenizer.encode(item.prompt)) for item in workload.items]
        results = [RequestResult(item) for item in workload.items]
        waiting = deque(range(len(results)))
        last: dict[int, float] = {}
        """Of the requests that are out: when the last token came, or the request was sent."""
        cpu, start = time.process_time(), time.perf_counter()
        while waiting or last:
            while waiting and len(last) < (workload.concurrency or len(results)):
                number = waiting.popleft()
                last[number] = time.perf_counter()
                results[number].due_s = last[number] - start
                params = SamplingParams(temperature=0.0, max_tokens=results[number].item.output_tokens, ignore_eos=True)
                core.add(EngineRequest(str(number), prompts[number], params))
            for delta in core.step() or ():
                number, now = int(delta.request_id), time.perf_counter()
                if delta.token_ids:
                    _note_tokens(results[number], now - last[number], len(delta.token_ids))
                    last[number] = now
                if delta.finish_reason is not None:
                    results[number].e2e_s = now - start - results[number].due_s
                    results[number].error = delta.error
                    del last[number]
                    on_done(results[number])
        return Run(workload, tuple(results), time.perf_counter() - start, time.process_time() - cpu)

    return run


def _note_tokens(result: RequestResult, gap_s: float, count: int) -> None:
    if result.ttft_s is None:
        result.ttft_s = gap_s
    else:
        result.gaps_s.append(gap_s)
    result.output_tokens += count


def generate_runner(generator: PaddedGenerator, writer: PromptWriter) -> Runner:
    """Runs waves of at most 16. Nobody hears of a token before its wave is over, so there are no latencies."""

    def run(workload: Workload, on_done: OnDone) -> Run:
        prompts = [tuple(writer.ids(item.prompt)) for item in workload.items]
        caps = [item.output_tokens for item in workload.items]
        cpu = time.process_time()
        done = generator.run(prompts, caps, min(BATCH_SIZE, workload.concurrency or BATCH_SIZE))
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
    figures = {}
    for name, count in read_names(workloads).items():
        workload = build_workload(name, writer, repeat=repeat, num_requests=count)
        figures[name] = measure(run, workload, name, server_pid=os.getpid(), quiet_limit_s=wait_quiet_s)
    text = json.dumps(figures, indent=1)
    print(text)
    if json_file is not None:
        json_file.write_text(text + "\n")


def _read_settings(config: Path) -> Settings:
    """Of the config's application; without Ray, which has no part in this."""
    return Settings.model_validate(yaml.safe_load(config.read_text())["applications"][0]["args"])


@app.command()
def engine(
    workloads: Workloads = "decode",
    config: Annotated[Path, typer.Option(help="The Serve config whose engine it is.")] = Path("deploy/config.yaml"),
    repeat: Repeat = 0,
    wait_quiet: WaitQuiet = 0.0,
    json_file: JsonFile = None,
) -> None:
    """The requests through the engine that a replica of the config would have, in this process."""
    from serve_app.serving.engine_config import engine_config

    settings = _read_settings(config)
    writer = open_writer(settings.model)
    core = EngineCore.load(engine_config(settings, use_gpu=False))
    _report(engine_runner(core, writer), writer, workloads, repeat, wait_quiet, json_file)


@app.command()
def generate(
    workloads: Workloads = "decode",
    config: Annotated[Path, typer.Option(help="The Serve config whose model it is.")] = Path("deploy/config.yaml"),
    repeat: Repeat = 0,
    wait_quiet: WaitQuiet = 0.0,
    json_file: JsonFile = None,
) -> None:
    """The requests through `model.generate` in float32, in static padded waves of 16."""
    settings = _read_settings(config)
    writer = open_writer(settings.model)
    run = generate_runner(PaddedGenerator(settings.model, "float32", "cpu"), writer)
    _report(run, writer, workloads, repeat, wait_quiet, json_file)


if __name__ == "__main__":
    app()
