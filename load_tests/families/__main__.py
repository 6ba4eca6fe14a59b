"""`python -m load_tests.families`: what every causal LM of transformers does here, on a CPU.

Keeps outcomes in a JSON file, so that an interrupted run goes on, and writes docs/models.md.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from load_tests.families.outcome import Outcome, families, try_family
from load_tests.families.page import PAGE, make_page

RESULTS = Path("build/families.json")
app = typer.Typer(add_completion=False)


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(help="Model types; default: all that have no outcome.")] = None,
    results: Annotated[Path, typer.Option("--json", help="File with the outcomes so far.")] = RESULTS,
    limit_s: Annotated[float, typer.Option(help="Seconds for one model.")] = 120.0,
    again: Annotated[bool, typer.Option("--again", help="Forget the outcomes so far.")] = False,
    page: Annotated[Path, typer.Option(help="Page to write once every model has an outcome.")] = PAGE,
) -> None:
    """Load a tiny random model of each family, and write the page of models."""
    known = families()
    outcomes = {} if again or not results.is_file() else json.loads(results.read_text())
    for name in names or [name for name in known if name not in outcomes]:
        outcomes[name] = asdict(try_family(name, limit_s))
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(outcomes, indent=1, sort_keys=True))
        typer.echo(f"{name}: {outcomes[name]['path']} {outcomes[name]['reason']}".rstrip())
    if known.keys() <= outcomes.keys():
        page.write_text(make_page({name: Outcome(**outcomes[name]) for name in known}))
        typer.echo(f"wrote {page}")


if __name__ == "__main__":
    app()
