"""How a panel is made: a title, what it shows, its unit and its queries. Everything else is alike
for all panels.

Decides looks, and the PromQL that many panels share. A query is a pair: PromQL, and the legend of
its series.
"""

from typing import Any

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models.common import GraphDrawStyle, LegendDisplayMode, LegendPlacement, StackingMode
from grafana_foundation_sdk.models.common import TooltipDisplayMode as TooltipMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

Query = tuple[str, str]
Row = tuple[str, list[Any]]
"""A title and panels."""

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
ENGINE = 'replica=~"$replica"'
"""Series of the engine replicas that are chosen at the top of a dashboard."""
TTFT = "serve_app_time_to_first_token_seconds"
AT_INGRESS = 'where="ingress"'

HALF, THIRD, QUARTER, SIXTH = 12, 8, 6, 4
"""Spans in Grafana's 24 columns."""


def lines(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    span: int = THIRD,
    stacked: bool = False,
    highest: float | None = None,
) -> Any:
    """Figures over time; `stacked` where their sum means something. `highest`: the top of the
    axis."""
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    panel = timeseries.Panel().min(0).draw_style(GraphDrawStyle.LINE).fill_opacity(30 if stacked else 0)
    panel = panel.legend(legend.show_legend(True)).tooltip(common.VizTooltipOptions().mode(TooltipMode.MULTI))
    if highest is not None:
        panel = panel.max(highest)
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    return _described(panel, title, description, unit, queries).span(span).height(7)


def number(title: str, description: str, unit: str, query: str) -> Any:
    """One figure: what the query says now."""
    return _described(stat.Panel(), title, description, unit, ((query, ""),)).span(SIXTH).height(4)


def spread(title: str, description: str, unit: str, histogram: str, selector: str = "") -> Any:
    """How a histogram's observations spread over its buckets, over time."""
    queries = ((total_rate(f"{histogram}_bucket", selector, by="le"), "{{le}}"),)
    panel = heatmap.Panel().calculate(False).y_axis(heatmap.YAxisConfig().unit(unit))
    return _described(panel, title, description, "cps", queries, PromQueryFormat.HEATMAP).span(HALF).height(7)


def _described(
    panel: Any,
    title: str,
    description: str,
    unit: str,
    queries: tuple[Query, ...],
    form: PromQueryFormat = PromQueryFormat.TIME_SERIES,
) -> Any:
    panel = panel.title(title).description(description).unit(unit).datasource(DATASOURCE)
    for index, (expr, legend) in enumerate(queries):
        target = prometheus.Dataquery().ref_id(chr(ord("A") + index)).expr(expr).legend_format(legend).format(form)
        panel = panel.with_target(target.range())
    return panel


def total_rate(counter: str, selector: str = "", by: str = "") -> str:
    """Growth of a counter per second, of all processes together (for each value of `by`)."""
    grouping = f"sum by ({by}) " if by else "sum"
    series = f"{counter}{{{selector}}}" if selector else counter
    return f"{grouping}(rate({series}[$__rate_interval]))"


def quantile(q: float, histogram: str, selector: str = "", by: str = "") -> str:
    """One quantile over all processes (for each value of `by`)."""
    return f"histogram_quantile({q}, {total_rate(f'{histogram}_bucket', selector, by=f'le, {by}' if by else 'le')})"


def quantiles(histogram: str, selector: str = "") -> tuple[Query, ...]:
    """Median, 95th and 99th percentile."""
    return tuple((quantile(q, histogram, selector), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99))
