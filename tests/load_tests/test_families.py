"""docs/models.md says what each family of transformers does here."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from load_tests.families.__main__ import app
from load_tests.families.outcome import FAST, MODULES, NOT_BUILT, REFUSED, WRONG, Outcome, families, try_family
from load_tests.families.page import PAGE, make_page, row
from tests.models import needs_compiler

LIMIT_S = 300.0
AGAIN = "write the page again: .venv/bin/python -m load_tests.families --again"

pytestmark = needs_compiler


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.read_text().partition(f"## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "mistral3", "qwen3_vl", "gpt_neox", "hunyuan_v1_moe", "bloom", "bert", "mamba"]
)
def test_a_family_does_what_the_page_says(name: str) -> None:
    outcome = try_family(name, LIMIT_S)
    if outcome.path == FAST:
        assert f"`{name}`" in section("On the C kernels"), AGAIN
    else:
        assert row(name, outcome) in PAGE.read_text(), AGAIN


def test_the_page_has_every_family_of_this_transformers() -> None:
    text = PAGE.read_text()
    assert not [name for name in families() if f"`{name}`" not in text and f"| {name} | " not in text], AGAIN


def test_no_family_fails_without_a_reason() -> None:
    assert "## Defects" not in PAGE.read_text()


def test_a_family_that_takes_too_long_is_ended() -> None:
    assert try_family("llama", 0.0) == Outcome("LlamaForCausalLM", NOT_BUILT, "it takes more than 0 s")


def test_a_run_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    """The page is written once every family has an outcome."""
    results, page = tmp_path / "families.json", tmp_path / "models.md"
    known = {name: {"name": "A", "path": path, "reason": "no | reason"} for name, path in zip(
        families(), [FAST, MODULES, REFUSED, NOT_BUILT, WRONG] * 100, strict=False
    )}  # fmt: skip
    del known["llama"]
    results.write_text(json.dumps(known))
    done = CliRunner().invoke(app, ["--json", str(results), "--page", str(page)])
    assert done.output.splitlines() == ["llama: fast", f"wrote {page}"]
    outcomes = {**known, "llama": {"name": "LlamaForCausalLM", "path": FAST, "reason": ""}}
    assert page.read_text() == make_page({name: Outcome(**outcomes[name]) for name in families()})
    assert "| no / reason |" in page.read_text()


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.timeout(1800)
def test_the_page_is_current(tmp_path: Path) -> None:
    page = tmp_path / "models.md"
    done = CliRunner().invoke(app, ["--json", str(tmp_path / "families.json"), "--page", str(page)])
    assert done.exit_code == 0
    assert page.read_text() == PAGE.read_text(), AGAIN
