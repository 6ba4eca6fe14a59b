"""What the experiments' pictures have in common: a size that is readable in a page, colours, and writing a PNG."""

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from serve_app.observability.timeline import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, PINK, SKY, RED = PALETTE[:6]
MARKERS = "osD^vP"
"""With the colours, so that lines are told apart without colour vision."""

_WIDTH, _DPI = 9.0, 110


def stacked_panels(count: int, height: float = 1.9) -> "tuple[Figure, list[Axes]]":
    """Panels one below the other over the same x-axis; `height` of each, in inches."""
    return _figure(count, 1, count * height + 0.8, share=True)


def side_by_side(count: int, height: float = 3.6) -> "tuple[Figure, list[Axes]]":
    """Panels beside each other, with axes of their own; `height` in inches."""
    return _figure(1, count, height, share=False)


def grid(rows: int, columns: int, height: float) -> "tuple[Figure, list[list[Axes]]]":
    """Rows of panels, each of one scale; `height` in inches."""
    figure = _empty(height)
    panels = figure.subplots(rows, columns, squeeze=False, sharex="row", sharey="row").tolist()
    return figure, [[_styled(panel) for panel in row] for row in panels]


def mosaic(layout: str, height: float) -> "tuple[Figure, dict[str, Axes]]":
    """Panels by the letters of a layout (matplotlib's `subplot_mosaic`); `height` in inches."""
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
    """Write a PNG; overwrites what is there."""
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png")
