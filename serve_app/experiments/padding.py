"""Cost of padding and copying in a padded batch, step by step: the counts, their sums, and their
pictures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 2**20


@dataclass(frozen=True, slots=True)
class PaddedStep:
    """Cost of padding in one step.

    computed: positions of the forward pass, including padding; wanted: those with a token. held:
    positions in the cache after the forward pass, including padding; used: those with a token.
    appended_bytes: keys and values copied to append a column to the cache; moved_bytes: keys and
    values copied to merge and filter.
    """

    computed: int
    wanted: int
    held: int
    used: int
    appended_bytes: int
    moved_bytes: int


def padding_figures(steps: Sequence[PaddedStep]) -> dict[str, Any]:
    """Return sums over a run, as plain data."""
    held, used = sum(step.held for step in steps), sum(step.used for step in steps)
    return {
        "padding_share_of_cache": round(1 - used / held, 4),
        "appended_mib": round(sum(step.appended_bytes for step in steps) / MIB, 3),
        "moved_mib": round(sum(step.moved_bytes for step in steps) / MIB, 3),
    }


def draw_held(axes: "Axes", steps: Sequence[PaddedStep]) -> None:
    """Draw the batch's cache over steps: positions with tokens, and the padding on top."""
    used, held = [step.used for step in steps], [step.held for step in steps]
    axes.stackplot(
        range(len(steps)),
        used,
        [all_ - tokens for all_, tokens in zip(held, used, strict=True)],
        colors=["#0072B2", "#BBBBBB"],
        labels=["tokens", "padding"],
    )
    axes.set_title("Padded continuous: what its KV cache holds", loc="left", fontsize=10, fontweight="bold")
    axes.set_ylabel("positions")
    axes.legend(loc="upper left", fontsize=8, frameon=False, ncols=2)


def draw_copies(axes: "Axes", steps: Sequence[PaddedStep]) -> None:
    """Draw the bytes of keys and values that each step copies."""
    axes.stackplot(
        range(len(steps)),
        [step.appended_bytes / MIB for step in steps],
        [step.moved_bytes / MIB for step in steps],
        colors=["#56B4E9", "#D55E00"],
        labels=["to append a column", "to merge and filter"],
    )
    axes.set_title("Padded continuous: keys and values copied in each step", loc="left", fontsize=10, fontweight="bold")
    axes.set_ylabel("MiB")
    axes.legend(loc="upper left", fontsize=8, frameon=False, ncols=2)
