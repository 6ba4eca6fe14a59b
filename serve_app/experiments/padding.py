"""What padding and copying cost a padded batch, step by step: the counts, their sums, and their pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 2**20


@dataclass(frozen=True, slots=True)
class PaddedStep:
    """What padding cost in one step.

    computed: positions of the forward pass, padding included; wanted: those that hold a token. held: positions in the
    cache after the forward pass, padding included; used: those that hold a token. Bytes of keys and values that were
    written again: appended_bytes, because the cache grows by one column by being copied; moved_bytes, by merging and
    filtering.
    """

    computed: int
    wanted: int
    held: int
    used: int
    appended_bytes: int
    moved_bytes: int


def padding_figures(steps: Sequence[PaddedStep]) -> dict[str, Any]:
    """Sums over a run, as plain data."""
    held, used = sum(step.held for step in steps), sum(step.used for step in steps)
    return {
        "padding_share_of_cache": round(1 - used / held, 4),
        "appended_mib": round(sum(step.appended_bytes for step in steps) / MIB, 3),
        "moved_mib": round(sum(step.moved_bytes for step in steps) / MIB, 3),
    }


def draw_held(axes: "Axes", steps: Sequence[PaddedStep]) -> None:
    """The batch's cache over steps: what holds tokens, and the padding on top."""
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
    """Bytes of keys and values that each step writes again."""
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
