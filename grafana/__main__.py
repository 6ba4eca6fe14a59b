"""`python -m grafana`: write the dashboards' JSON to `grafana/json/`."""

from pathlib import Path

from grafana.dashboards import ROWS, to_json

FOLDER = Path(__file__).parent / "json"

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in ROWS:
        (FOLDER / f"{name}.json").write_text(to_json(name))
