"""What we are measured against: batched `generate` offline, and transformers' own server with continuous batching.

    python -m load_tests.baselines setup    --folder build/peers
    python -m load_tests.baselines generate --workload decode --repeats 3 --json FILE

Decides how the baselines are installed and run; sends no load over HTTP (see `bench` and `side_by_side`).
"""

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from load_tests.client import median_of
from load_tests.machine import Meter, wait_until_quiet
from load_tests.servers import ServerCommand
from load_tests.workloads import build_workload, open_writer
from serve_app.cli.outputs import JsonFile

PEER_PORT = 8101
BATCH_SIZE = 16
_PINS = ("torch==2.13.0", "transformers[serving]==5.23.0", "accelerate==1.15.0")

app = typer.Typer(add_completion=False, help=__doc__)
console = Console(stderr=True)


def model_folder(peers: Path) -> Path:
    """Where `setup` writes the default model as safetensors."""
    return peers / "model-float32"


def transformers_serve(peers: Path) -> ServerCommand:
    """`transformers serve` with continuous batching in float32 on the CPU, as `setup` prepared it.

    It refuses fields it does not know and takes the number of tokens in a JSON string inside the body.
    """
    model = model_folder(peers).absolute()
    command = [str((peers / "venv/bin/transformers").absolute()), "serve", str(model), "--continuous-batching"]
    command += ["--device", "cpu", "--dtype", "float32", "--attn-implementation", "sdpa"]
    command += ["--host", "127.0.0.1", "--port", str(PEER_PORT)]
    return ServerCommand(
        name="transformers_serve",
        command=tuple(command),
        base_url=f"http://127.0.0.1:{PEER_PORT}",
        ready_path="/health",
        model=str(model),
        extra_body={"generation_config": '{"max_new_tokens": $MAX_TOKENS, "do_sample": false}'},
        extensions=False,
        environment={"HF_HUB_OFFLINE": "1"},
    )


@app.command()
def setup(folder: Annotated[Path, typer.Option(help="Where the environment and the model go.")]) -> None:
    """Make the peers' virtual environment and write the default model as safetensors, unless both are there."""
    python = folder / "venv/bin/python"
    if not (folder / "venv/bin/transformers").exists():
        console.print(f"installing {', '.join(_PINS)} into {folder / 'venv'}")
        venv.create(folder / "venv", with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *_PINS], check=True)
    if not (model_folder(folder) / "config.json").exists():
        console.print(f"writing the default model to {model_folder(folder)}")
        write_safetensors(model_folder(folder))


def write_safetensors(target: Path, model: str = "default") -> None:
    """Write a model (any form that serve_app takes) as a folder with float32 safetensors and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from serve_app.model_files import locate_model

    files = locate_model(model)
    source = AutoModelForCausalLM.from_pretrained(files.source, gguf_file=files.gguf_file, dtype=torch.float32)
    # The loaded model remembers that it came out of a quantized file and would be saved as one; a fresh one does not.
    config = type(source.config)(**_without_origin(source.config.to_dict()))
    fresh = type(source)(config)
    fresh.load_state_dict(source.state_dict())
    fresh.save_pretrained(target)
    AutoTokenizer.from_pretrained(files.source, gguf_file=files.gguf_file).save_pretrained(target)


def _without_origin(config: dict[str, Any]) -> dict[str, Any]:
    origin = ("quantization_config", "_name_or_path", "transformers_version")
    return {key: value for key, value in config.items() if key not in origin}


@app.command()
def generate(
    workload: str = "decode",
    model: Annotated[str, typer.Option(help='"default", a folder, a .gguf file or a hub id.')] = "default",
    repeats: Annotated[int, typer.Option(min=1)] = 1,
    seed: int = 0,
    num_requests: Annotated[int | None, typer.Option(min=1)] = None,
    wait_quiet: Annotated[float, typer.Option(help="Wait up to so many seconds for a quiet machine.")] = 0.0,
    json_file: JsonFile = None,
) -> None:
    """The workload's requests through `model.generate`, offline, in static padded waves of 16."""
    from serve_app.cli.padded import PaddedGenerator

    writer = open_writer(model)
    generator = PaddedGenerator(model, "float32", "cpu")
    runs = []
    for repeat in range(repeats):
        requests = build_workload(workload, writer, seed=seed, repeat=repeat, num_requests=num_requests)
        prompts = [tuple(writer.ids(item.prompt)) for item in requests.items]
        caps = [item.output_tokens for item in requests.items]
        if repeat == 0:
            generator.run(prompts[:2], [4, 4], 2)
        if wait_quiet:
            wait_until_quiet(wait_quiet)
        columns = TextColumn("{task.description:<24}"), BarColumn(), TextColumn("{task.completed}/{task.total} tokens")
        with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
            task = progress.add_task(f"generate {workload} {repeat + 1}/{repeats}", total=sum(caps))
            meter = Meter(None)
            run = generator.run(
                prompts,
                caps,
                min(BATCH_SIZE, requests.concurrency or BATCH_SIZE),
                lambda tokens, progress=progress, task=task: progress.advance(task, tokens),  # type: ignore[misc]
            )
        figures = meter.read()
        runs.append(
            {
                "workload": workload,
                "output_tokens": sum(caps),
                "steps": run.steps,
                "seconds": round(run.seconds, 3),
                "output_tok_s": round(sum(caps) / run.seconds, 2),
                "prompt_tok_s": round(sum(map(len, prompts)) / run.seconds, 2),
                "foreign_cores": figures["foreign_cores"],
            }
        )
    text = json.dumps({"median": median_of(runs), "runs": runs}, indent=1)
    print(text)
    if json_file is not None:
        json_file.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(app())
