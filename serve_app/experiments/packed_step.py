"""One packed step as plain data and as pictures: the request of each part of the row, and the
tokens that each token may attend to.

Decides how a `StepRecord` is explained; runs nothing. The mask is drawn from the record's rows: a
token at position p of a request attends to positions 0..p of that request and to no other request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.core.step_record import StepRecord
from serve_app.observability.timeline import colour_of

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_OWN_FUTURE = "#E4E4E4"


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of the packed batch that belongs to one request.

    `row_start`: the segment's first index in the row. `start`: the position of its first token
    within the request, so `start` tokens are already in the KV cache. `texts`: one per token.
    """

    request_id: str
    slot: int
    row_start: int
    start: int
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    is_prefill: bool
    samples: bool

    @property
    def num_keys(self) -> int:
        """Tokens of this request in the KV cache after the step."""
        return self.start + len(self.token_ids)

    @property
    def sentence(self) -> str:
        """Description of the request's work in this step."""
        count = len(self.token_ids)
        if not self.is_prefill:
            return f"decodes: feeds its newest token, which attends to all {self.num_keys} of its tokens"
        what = f"computes {count} prompt token{'s' if count > 1 else ''} at once"
        if self.start:
            what += f", after {self.start} that earlier steps computed"
        return f"prefill: {what}" + (" and samples its first new token" if self.samples else "; the rest follows later")


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One step of a run. Segments are in row order."""

    step: int
    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        """Length of the packed batch."""
        return sum(len(segment.token_ids) for segment in self.segments)

    def to_json(self) -> dict[str, Any]:
        """Return plain data. `attends_to`: per token, the half-open range of its request's
        positions that it may attend to.
        """
        return {
            "step": self.step,
            "num_tokens": self.num_tokens,
            "num_prefill_tokens": sum(len(s.token_ids) for s in self.segments if s.is_prefill),
            "num_decode_tokens": sum(len(s.token_ids) for s in self.segments if not s.is_prefill),
            "segments": [
                {
                    "request_id": segment.request_id,
                    "slot": segment.slot,
                    "kind": "prefill" if segment.is_prefill else "decode",
                    "row": [segment.row_start, segment.row_start + len(segment.token_ids)],
                    "positions": [segment.start, segment.num_keys],
                    "token_ids": list(segment.token_ids),
                    "tokens": list(segment.texts),
                    "attends_to": [[0, segment.start + i + 1] for i in range(len(segment.token_ids))],
                    "samples": segment.samples,
                }
                for segment in self.segments
            ],
        }


def packed_step(record: StepRecord, token_ids: Mapping[str, Sequence[int]], texts: Mapping[int, str]) -> PackedStep:
    """Convert a record. token_ids: all tokens of each request up to that step; texts: text of each
    token id.

    Raises `ValueError` if the record computes tokens that `token_ids` lacks.
    """
    segments = []
    row_start = 0
    for row in record.rows:
        ids = tuple(token_ids[row.request_id][row.start : row.start + row.num_tokens])
        if len(ids) != row.num_tokens:
            raise ValueError(f"step {record.step} computes tokens of {row.request_id} that are unknown")
        words = tuple(texts[token_id] for token_id in ids)
        segments.append(
            Segment(row.request_id, row.slot, row_start, row.start, ids, words, row.is_prefill, row.samples)
        )
        row_start += row.num_tokens
    return PackedStep(record.step, tuple(segments))


def _colour(step: PackedStep, segment: Segment) -> str:
    return colour_of(step.segments.index(segment))


def draw_row(step: PackedStep) -> "RenderableType":
    """Return a table of the packed batch, token by token, with one line per request."""
    from rich.table import Table
    from rich.text import Text

    table = Table("request", "in the row", "its positions", "what it does")
    table.add_column("tokens", overflow="fold")
    for segment in step.segments:
        row_end = segment.row_start + len(segment.token_ids) - 1
        tokens = Text()
        for index, text in enumerate(segment.texts):
            tokens.append(_visible(text), style=f"{_colour(step, segment)}{' underline' if index % 2 else ''}")
        table.add_row(
            Text(segment.request_id, style=f"bold {_colour(step, segment)}"),
            _range(segment.row_start, row_end),
            _range(segment.start, segment.num_keys - 1),
            segment.sentence,
            tokens,
        )
    return table


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}..{last}"


def _visible(text: str) -> str:
    """Return a token's text on one line, with visible spaces."""
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥") or "∅"


def draw_mask(step: PackedStep) -> "Text":
    """Return the attention mask: one line per token of the row, one column per key, keys grouped by
    request.

    Allowed: ▓ a key from the KV cache, █ a key of this step. Not allowed: ░ a later token of the
    same request, · another request's key (never computed).
    """
    from rich.text import Text

    text = Text(no_wrap=True, overflow="crop")
    width = 14
    text.append(" " * (width + 6))
    for key in step.segments:
        text.append(key.request_id[: key.num_keys].ljust(key.num_keys + 1), style=f"bold {_colour(step, key)}")
    text.append("\n")
    for segment in step.segments:
        for index, word in enumerate(segment.texts):
            colour = _colour(step, segment)
            text.append(f"{segment.row_start + index:>3} {segment.request_id} ", style=f"bold {colour}")
            text.append(_visible(word)[: width - 1].ljust(width), style=colour)
            for key in step.segments:
                seen = segment.start + index + 1 if key is segment else 0
                later = key.num_keys - seen if key is segment else 0
                cached = min(seen, segment.start)
                text.append("▓" * cached + "█" * (seen - cached), style=colour)
                text.append("░" * later + "·" * (key.num_keys - seen - later) + " ", style="dim")
            text.append("\n")
    return text


def draw_mask_png(path: Path, step: PackedStep) -> None:
    """Draw the mask of `draw_mask` as a PNG. Overwrites an existing file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_keys = sum(segment.num_keys for segment in step.segments)
    cell = 0.2
    size = (max(9.0, cell * num_keys + 6.5), max(4.0, cell * step.num_tokens + 2.6))
    figure = Figure(figsize=size, dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    first_key = 0
    for segment in step.segments:
        _draw_segment(axes, step, segment, first_key)
        first_key += segment.num_keys
    axes.set_xlim(0, num_keys)
    axes.set_ylim(step.num_tokens, 0)
    words = [(s, i, text) for s in step.segments for i, text in enumerate(s.texts)]
    axes.set_yticks(
        [index + 0.5 for index in range(step.num_tokens)],
        [f"{_plain(text)}   {s.request_id}{s.start + i}" for s, i, text in words],
        fontsize=8,
    )
    for tick, (segment, _, _) in zip(axes.get_yticklabels(), words, strict=True):
        tick.set_color(_darker(_colour(step, segment)))
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("keys in the KV cache, request by request")
    axes.set_ylabel("the packed batch: every token of this step")
    axes.set_title(
        f"Step {step.step}: {step.num_tokens} tokens of {len(step.segments)} requests, one forward pass, no padding\n",
        loc="left",
        fontsize=11,
        fontweight="bold",
    )
    figure.supxlabel(
        "strong colour: may attend, key of this step    pale colour: may attend, key from the KV cache    "
        "grey: a later token of the same request    white: another request, never attended to",
        fontsize=8,
    )
    figure.savefig(path, format="png")


def _draw_segment(axes: Any, step: PackedStep, segment: Segment, first_key: int) -> None:
    """Draw one diagonal block of the mask with its labels."""
    colour = _colour(step, segment)
    count = len(segment.token_ids)
    for index in range(count):
        seen = segment.start + index + 1
        shades = [(0, segment.start, colour, 0.45), (segment.start, seen, colour, 1.0)]
        for first, last, shade, alpha in [*shades, (seen, segment.num_keys, _OWN_FUTURE, 1.0)]:
            cells = [(first_key + key + 0.06, 0.88) for key in range(first, last)]
            axes.broken_barh(cells, (segment.row_start + index + 0.06, 0.88), facecolors=shade, alpha=alpha)
    axes.text(
        first_key + segment.num_keys / 2,
        -0.35,
        f"{segment.request_id}: {segment.num_keys} keys",
        ha="center",
        va="bottom",
        fontsize=8,
        color=_darker(colour),
    )
    axes.axhline(segment.row_start, color="#999999", linewidth=0.5, linestyle=":")
    axes.axvline(first_key, color="#999999", linewidth=0.5, linestyle=":")
    axes.annotate(
        f"{segment.request_id} {segment.sentence}",
        (1.01, segment.row_start + count / 2),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=8,
        color=_darker(colour),
    )


def _plain(text: str) -> str:
    """Return token text that any font can show; `$` would start a formula."""
    shown = text.strip().replace("\n", "\\n").replace("$", r"\$")
    return (shown if shown.isascii() and shown else ascii(text))[:16]


def _darker(colour: str) -> str:
    """Return the colour at two thirds of its brightness, readable as text on white."""
    return "#" + "".join(f"{int(colour[i : i + 2], 16) * 2 // 3:02X}" for i in (1, 3, 5))
