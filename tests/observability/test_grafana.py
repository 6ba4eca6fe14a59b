"""The dashboards: their JSON is the code's, their queries are valid and about metrics that
exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.observability.prometheus import DEPLOY, ONLY_ON_GPUS, defined_series, metric_names, promtool

JSON = Path(__file__).parents[2] / "grafana" / "json"


def queries() -> Iterator[tuple[str, str]]:
    """(panel, PromQL) of every query of every dashboard, with Grafana's variables filled in."""
    for path in sorted(JSON.glob("*.json")):
        for panel in _panels(json.loads(path.read_text())["panels"]):
            for target in panel.get("targets", ()):
                expr = target["expr"].replace("$__rate_interval", "5s").replace("$replica", ".*")
                yield f"{path.stem}: {panel['title']}", expr


def _panels(panels: list[Any]) -> Iterator[Any]:
    for panel in panels:
        yield panel
        yield from _panels(panel.get("panels", []))


def test_the_json_is_what_the_code_makes() -> None:
    dashboards = pytest.importorskip("grafana.dashboards", reason="grafana-foundation-sdk is not installed")
    made = {f"{name}.json": dashboards.to_json(name) for name in dashboards.ROWS}
    kept = {path.name: path.read_text() for path in JSON.glob("*.json")}
    assert kept == made, "run `python -m grafana`"


def test_every_panel_has_a_query_and_says_what_it_shows() -> None:
    for path in JSON.glob("*.json"):
        for panel in _panels(json.loads(path.read_text())["panels"]):
            if panel["type"] != "row":
                assert panel["targets"], panel["title"]
                assert panel["description"], panel["title"]


def test_queries_are_valid_promql(tmp_path: Path) -> None:
    rules = [{"record": f"query:{index}", "expr": expr} for index, (_, expr) in enumerate(queries())]
    assert len(rules) > 40
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", str(file))


def test_panels_show_metrics_that_exist_and_all_of_them() -> None:
    defined = defined_series()
    shown: set[str] = set()
    for panel, expr in queries():
        names = metric_names(expr)
        assert names <= defined, panel
        shown |= names
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in defined}
    assert families - {re.sub("_(bucket|sum|count)$", "", name) for name in shown} == set()
    assert shown >= ONLY_ON_GPUS


def test_grafana_finds_its_data_where_our_prometheus_is() -> None:
    provisioning = JSON.parent / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "serve_app.yml").read_text())["datasources"]
    interval = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval
