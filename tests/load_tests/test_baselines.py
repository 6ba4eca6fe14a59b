"""The offline baseline on a tiny model, and the figures of a side-by-side run."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from load_tests.baselines import app, write_safetensors
from load_tests.side_by_side import GENERATE, OURS, PEER, draw, ratios, show


def contestant(rate: float) -> dict[str, Any]:
    return {"decode": {"median": {"output_tok_s": rate}, "runs": [{"output_tok_s": rate}] * 3}}


RESULTS = {OURS: contestant(150.0), GENERATE: contestant(100.0), PEER: contestant(50.0)}


def test_ratios_are_ours_over_theirs() -> None:
    assert ratios(RESULTS, ["decode"]) == {"decode": {GENERATE: 1.5, PEER: 3.0}}


def test_table_and_plot(tmp_path: Path) -> None:
    assert show(RESULTS, ["decode"]).row_count == 3
    draw(tmp_path / "bars.png", RESULTS, ["decode"])
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_generate_counts_passes_and_tokens(tmp_path: Path) -> None:
    """One wave: as many passes as the longest output has tokens."""
    import torch
    from transformers import PreTrainedTokenizerFast

    from serve_app.text.tokenizer import load_tokenizer
    from tests.models import tiny_model

    folder = tmp_path / "tiny"
    tokenizer = load_tokenizer("default")._tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    model = tiny_model("llama", torch.float32)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    again = tmp_path / "again"
    write_safetensors(again, str(folder))
    file = tmp_path / "figures.json"
    options = ["--model", str(again), "--workload", "decode", "--num-requests", "3", "--json", str(file)]
    result = CliRunner().invoke(app, ["generate", *options])
    assert result.exit_code == 0, result.output
    (run,) = json.loads(file.read_text())["runs"]
    assert (run["steps"], run["output_tokens"]) == (128, 384)
    assert run["output_tok_s"] == pytest.approx(384 / run["seconds"], rel=0.01)
