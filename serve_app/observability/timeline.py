"""Slots over steps: which request used which slot in which step. Drawn in a terminal or as PNG.

Converts recorded steps to spans and draws them. Uses only `StepRecord`s and never repeats the
scheduling, so a picture shows what really happened.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.core.step_record import StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.text import Text

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#6F4E7C")
"""Okabe and Ito's colours, which are distinct in all kinds of colour vision.

Their black is reserved for text; the eighth colour is a dark violet.
"""

_MORE_INCHES = 1.6
_IDLE, _WASTED = "#EEEEEE", "#BBBBBB"


class Work(StrEnum):
    """What a slot did in a step. WASTED: computed padding of a static batch."""

    PREFILL = "prefill"
    DECODE = "decode"
    WASTED = "wasted"


@dataclass(frozen=True, slots=True)
class Span:
    """One slot doing one kind of work for one choice of a request, in steps [start, stop).

    constrained: a grammar constrains the choice.
    """

    slot: int
    start: int
    stop: int
    request_id: str
    choice: int
    work: Work
    constrained: bool = False


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of one run. Steps are numbered from 0 in recorded order."""

    title: str
    num_slots: int
    num_steps: int
    spans: tuple[Span, ...]

    @property
    def useful_share(self) -> float:
        """Fraction of slot-steps that computed useful tokens. 1.0: the batch was always full."""
        useful = sum(span.stop - span.start for span in self.spans if span.work is not Work.WASTED)
        return useful / max(1, self.num_slots * self.num_steps)


def timeline_of(title: str, records: Iterable[StepRecord], num_slots: int) -> Timeline:
    """Return the timeline of recorded steps. `num_slots` is the engine's `max_num_seqs`.

    Raises `ValueError` if a record uses a slot that does not exist.
    """
    open_spans: dict[int, Span] = {}
    closed: list[Span] = []
    num_steps = 0
    for column, record in enumerate(records):
        num_steps = column + 1
        for row in record.rows:
            if not 0 <= row.slot < num_slots:
                raise ValueError(f"step {record.step} uses slot {row.slot} of {num_slots}")
            work = Work.PREFILL if row.is_prefill else Work.DECODE
            new = Span(row.slot, column, column + 1, row.request_id, row.choice, work, row.constrained)
            old = open_spans.get(row.slot)
            if old is not None and old.stop == column and _same_work(old, new):
                new = replace(old, stop=column + 1)
            elif old is not None:
                closed.append(old)
            open_spans[row.slot] = new
    closed.extend(open_spans.values())
    return Timeline(title, num_slots, num_steps, tuple(sorted(closed, key=lambda span: (span.slot, span.start))))


def _same_work(a: Span, b: Span) -> bool:
    return (a.request_id, a.choice, a.work) == (b.request_id, b.choice, b.work)


def draw_terminal(timeline: Timeline, groups: Mapping[str, int], steps_per_column: float = 1.0) -> "Text":
    """Draw one line per slot, one character per `steps_per_column` steps, coloured by group.

    A character shows the work that filled most of its steps; its height shows whether at least half
    of the steps were filled. Constrained output is underlined.
    """
    from rich.text import Text

    # Subtracting the small number avoids an extra column from rounding errors.
    columns = math.ceil(timeline.num_steps / steps_per_column - 1e-6)
    by_slot: dict[int, list[Span]] = {slot: [] for slot in range(timeline.num_slots)}
    for span in timeline.spans:
        by_slot[span.slot].append(span)
    text = Text(no_wrap=True, overflow="crop")
    for slot, spans in by_slot.items():
        text.append(f"slot {slot:>2} ", style="dim")
        for column in range(columns):
            start, stop = column * steps_per_column, min((column + 1) * steps_per_column, timeline.num_steps)
            text.append(*_character(spans, start, stop, groups))
        text.append("\n")
    return text


def _character(spans: Sequence[Span], start: float, stop: float, groups: Mapping[str, int]) -> tuple[str, str]:
    """Return the glyph and the style for steps [start, stop) of one slot."""
    shares = [(min(span.stop, stop) - max(span.start, start), span) for span in spans]
    shares = [(share, span) for share, span in shares if share > 1e-9]
    used = sum(share for share, _ in shares)
    if not shares or used < 0.02 * (stop - start):
        return "·", "dim"
    _, owner = max(shares, key=lambda item: item[0])
    if owner.work is Work.WASTED:
        return "×", "dim"
    glyph = "▒" if owner.work is Work.PREFILL else "▇" if used >= 0.5 * (stop - start) else "▃"
    return glyph, colour_of(groups.get(owner.request_id, 0)) + (" underline" if owner.constrained else "")


def colour_of(group: int) -> str:
    """Return the colour of a group of requests as `#RRGGBB`. The palette repeats after eight."""
    return PALETTE[group % len(PALETTE)]


def draw_png(
    path: Path,
    timelines: Sequence[Timeline],
    groups: Mapping[str, int],
    group_labels: Sequence[str],
    more: Sequence[Callable[["Axes"], None]] = (),
) -> None:
    """Write a PNG with one panel per timeline, all on the same scale of steps.

    `groups` maps request ids to positions in `group_labels`. Each of `more` draws a further panel
    over the same steps. Overwrites `path`.
    """
    # Uses matplotlib's object interface with its own canvas, because pyplot has global state and
    # needs a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_slots = max(timeline.num_slots for timeline in timelines)
    panel_inches = max(1.5, 0.22 * num_slots) + 0.5
    heights = [panel_inches] * len(timelines) + [_MORE_INCHES] * len(more)
    figure = Figure(figsize=(13, sum(heights) + 1.1), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel, timeline in zip(panels[: len(timelines)], timelines, strict=True):
        _draw_panel(panel, timeline, groups)
    for panel, draw in zip(panels[len(timelines) :], more, strict=True):
        draw(panel)
        panel.tick_params(labelsize=8, length=2)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("step (one forward pass of the model)")
    panels[-1].set_xlim(0, max(1, *(timeline.num_steps for timeline in timelines)))
    _draw_legend(figure, timelines, group_labels)
    figure.savefig(path, format="png")


def _draw_panel(panel: Any, timeline: Timeline, groups: Mapping[str, int]) -> None:
    panel.set_title(timeline.title, loc="left", fontsize=10, fontweight="bold")
    panel.broken_barh([(0, timeline.num_steps)], (-0.5, timeline.num_slots), facecolors=_IDLE, edgecolor="none")
    for span in timeline.spans:
        wasted, prefill = span.work is Work.WASTED, span.work is Work.PREFILL
        panel.broken_barh(
            [(span.start, span.stop - span.start)],
            (span.slot - 0.42, 0.84),
            facecolors="white" if wasted else colour_of(groups.get(span.request_id, 0)),
            edgecolor=_WASTED if wasted else "white",
            linewidth=0.0 if wasted else 0.4,
            hatch="////" if wasted else "xxxx" if prefill else None,
        )
    panel.set_ylim(timeline.num_slots - 0.5, -0.5)
    panel.set_yticks(range(timeline.num_slots))
    panel.set_ylabel("slot")
    panel.tick_params(labelsize=8, length=2)
    panel.spines[["top", "right", "left"]].set_visible(False)


def _draw_legend(figure: Any, timelines: Sequence[Timeline], group_labels: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour_of(group), label=label) for group, label in enumerate(group_labels)]
    works = {span.work for timeline in timelines for span in timeline.spans}
    if Work.PREFILL in works:
        handles.append(Patch(facecolor="#888888", edgecolor="white", hatch="xxxx", label="reads its prompt"))
    if Work.WASTED in works:
        handles.append(Patch(facecolor="white", edgecolor=_WASTED, hatch="////", label="padding"))
    handles.append(Patch(facecolor=_IDLE, label="idle"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(9, len(handles)), fontsize=8, frameon=False)
