"""Shared by the experiments' pictures: a size that is readable in a page, colours, and writing a
PNG.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from serve_app.observability.timeline import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, PINK, SKY, RED = PALETTE[:6]
MARKERS = "osD^vP"
"""Used with the colours, so that lines are distinguishable without colour vision."""

_WIDTH, _DPI = 9.0, 110


def stacked_panels(count: int, height: float = 1.9) -> "tuple[Figure, list[Axes]]":
    """Return panels stacked over the same x-axis. `height`: of each, in inches."""
    return _figure(count, 1, count * height + 0.8, share=True)


def side_by_side(count: int, height: float = 3.6) -> "tuple[Figure, list[Axes]]":
    """Return panels side by side, with separate axes. `height` in inches."""
    return _figure(1, count, height, share=False)


def grid(rows: int, columns: int, height: float) -> "tuple[Figure, list[list[Axes]]]":
    """Return rows of panels. Each row shares its scales. `height` in inches."""
    figure = _empty(height)
    panels = figure.subplots(rows, columns, squeeze=False, sharex="row", sharey="row").tolist()
    return figure, [[_styled(panel) for panel in row] for row in panels]


def mosaic(layout: str, height: float) -> "tuple[Figure, dict[str, Axes]]":
    """Return panels by the letters of matplotlib's `subplot_mosaic`. `height` in inches."""
    figure = _empty(height)
    return figure, {name: _styled(panel) for name, panel in figure.subplot_mosaic(layout).items()}


def _figure(rows: int, columns: int, height: float, share: bool) -> "tuple[Figure, list[Axes]]":
    figure = _empty(height)
    return figure, [_styled(panel) for panel in figure.subplots(rows, columns, squeeze=False, sharex=share).flat]


def _empty(height: float) -> Figure:
    return Figure(figsize=(_WIDTH, height), dpi=_DPI, layout="constrained", facecolor="white")


def _styled(panel: "Axes") -> "Axes":
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.25)
    panel.set_axisbelow(True)
    return panel


def save(figure: Figure, path: Path) -> None:
    """Write a PNG. Overwrites an existing file."""
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png")
