"""The engine alone and batched `generate` on a tiny model: the tokens that were asked for, and
their times."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from load_tests.bench.offline import OurEngine, app
from load_tests.bench.peer_setup import write_safetensors
from load_tests.bench.step_runner import StepOutput, step_runner
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.model.paged_model import PagedModel
from serve_app.workloads.mixes import GREEDY, SAMPLED, WorkItem, Workload
from tests.workloads.fake_server import WRITER


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a server with a tiny model that has the default model's tokenizer."""
    import torch
    from transformers import PreTrainedTokenizerFast

    from serve_app.text.tokenizer import load_tokenizer
    from tests.models import tiny_model

    folder = tmp_path_factory.mktemp("offline")
    tokenizer = load_tokenizer("default")._tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    model = tiny_model("llama", torch.float32)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    write_safetensors(folder / "again", str(folder / "tiny"))
    args = {"model": str(folder / "again"), "quantization": "none", "engine": {"kv_cache_gib": 0.05, "num_threads": 1}}
    application = {"name": "tiny", "import_path": "serve_app.app:build", "args": args}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path


@pytest.mark.parametrize("baseline", ["engine", "generate"])
def test_every_request_gets_its_tokens(baseline: str, config: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ["--config", str(config), "--workloads", "decode:3,single:2", "--json", str(file)]
    result = CliRunner().invoke(app, [baseline, *options])
    assert result.exit_code == 0, result.output
    runs = json.loads(file.read_text())
    assert [(name, run["requests"], run["output_tokens"]) for name, run in runs.items()] == [
        ("decode", 3, 384),
        ("single", 2, 256),
    ]
    for run in runs.values():
        assert (run["failures"], run["wrong_length"], run["prompt_mismatch"]) == (0, 0, 0)
        # To the millisecond that the seconds are rounded to, which is much of a tiny model's run.
        assert run["output_tokens"] / run["output_tok_s"] == pytest.approx(run["seconds"], abs=0.001)
        assert run["server_pss_mib"] > 1
    latencies = runs["single"]["ttft_ms"], runs["single"]["itl_ms"]
    if baseline == "engine":
        assert all(0 < kind["p50"] <= kind["p99"] < 1000 * runs["single"]["seconds"] for kind in latencies)
    else:
        assert all(kind["p50"] is None for kind in latencies)


def test_our_engine_samples_as_the_request_says(tiny_llama: PagedModel) -> None:
    core = EngineCore(tiny_llama, EngineConfig(kv_cache_gib=0.01))
    for number, sampling in enumerate((GREEDY, SAMPLED)):
        OurEngine(core).add(number, (5, 6), WorkItem("five six", 2, 3, sampling=sampling))
    params = [core._scheduler._choices[name][0].params for name in ("0", "1")]
    assert [(one.temperature, one.top_p, one.max_tokens) for one in params] == [(0.0, 1.0, 3), (0.9, 0.95, 3)]


class Counter:
    """An engine that computes a token of every request in each step, and notes who was in it."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.steps: list[set[int]] = []

    def add(self, number: int, prompt: Sequence[int], item: WorkItem) -> None:
        self.left[number] = item.output_tokens

    def step(self) -> Iterable[StepOutput]:
        self.steps.append(set(self.left))
        for number in list(self.left):
            self.left[number] -= 1
            ended = not self.left[number]
            if ended:
                del self.left[number]
            yield StepOutput(number, 1, ended)


@pytest.mark.parametrize(
    ("in_turns", "steps"),
    [(False, [{0, 1}, {0, 2}, {0, 3}]), (True, [{0, 1}, {0, 3}, {0}, {2}])],
    ids=["any place", "in turns"],
)
def test_the_next_request_goes_out_when_its_place_is_free(in_turns: bool, steps: list[set[int]]) -> None:
    engine = Counter()
    items = tuple(WorkItem("one two", 2, tokens) for tokens in (3, 1, 1, 1))
    run = step_runner(engine, WRITER)(Workload("w", items, 2, in_turns), lambda _: None)
    assert engine.steps == steps
    assert [result.output_tokens for result in run.results] == [3, 1, 1, 1]
    assert all(result.error is None and result.ttft_s is not None for result in run.results)
