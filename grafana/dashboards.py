"""The dashboards, put together from their rows of panels.

The tests run every query of every panel against a Prometheus that scrapes a loaded fleet, and look
every name in it up among the definitions of the metrics.
"""

from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, VariableOption, VariableRefresh

from grafana import batching, overview, replicas
from grafana.panels import DATASOURCE, Row

ROWS: dict[str, tuple[Row, ...]] = {
    "overview": overview.ROWS,
    "batching": batching.ROWS,
    "replicas": replicas.ROWS,
}


def to_json(name: str) -> str:
    """One of `ROWS` as Grafana imports it."""
    return str(JSONEncoder(sort_keys=True, indent=2).encode(_build(name, ROWS[name]))) + "\n"


def _build(name: str, rows: tuple[Row, ...]) -> Any:
    datasource = dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    replica = (
        dashboard.QueryVariable("replica")
        .label("Replica")
        .datasource(DATASOURCE)
        .query("label_values(serve_app_requests_running, replica)")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(selected=True, text=["All"], value=["$__all"]))
    )
    board = (
        dashboard.Dashboard(f"serve_app: {name}")
        .uid(f"serve-app-{name}")
        .tags(["serve_app"])
        .time("now-15m", "now")
        .refresh("5s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(datasource)
        .with_variable(replica)
    )
    for title, panels in rows:
        board = board.with_row(dashboard.Row(title))
        for panel in panels:
            board = board.with_panel(panel)
    return board.build()
