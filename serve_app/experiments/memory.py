"""KV memory reserved and used by static batches, contiguous reservations and pages, in real runs.

All three have the same memory and the same requests. The server knows only the maximum output
length. Reserved is the memory that each way must set aside for the rows that a step recorded:

    static       the longest request's memory for every row, until the whole batch has ended
    contiguous   the longest request's memory for every running request
    paged        the allocated blocks of the pool; more requests fit, so more run
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from serve_app.core.step_record import StepRecord
from serve_app.experiments.compare_runs import CompareJob, OnTokens

MIB = 2**20


class Way(StrEnum):
    """The ways to reserve KV memory. The values are keys of the JSON report."""

    STATIC = "static"
    CONTIGUOUS = "contiguous"
    PAGED = "paged"


TITLES = {
    Way.STATIC: "Static: every row keeps room for the longest request until the batch ends",
    Way.CONTIGUOUS: "Contiguous: every running request has room for the longest",
    Way.PAGED: "Paged: blocks as they are needed",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """KV positions reserved, and KV positions that hold a running request's keys and values, in one
    step.
    """

    reserved: int
    used: int
    running: int


@dataclass(frozen=True, slots=True)
class MemoryRun:
    """One run, step by step. total: positions of the KV memory; position_bytes: bytes per position
    over all layers.
    """

    usages: tuple[Usage, ...]
    total: int
    position_bytes: int

    def report(self) -> dict[str, Any]:
        """Return means over the steps, and the steps themselves, as plain data."""
        reserved, used = sum(one.reserved for one in self.usages), sum(one.used for one in self.usages)
        everything = len(self.usages) * self.total
        return {
            "steps": len(self.usages),
            "most_running": max(one.running for one in self.usages),
            "mean_running": round(sum(one.running for one in self.usages) / len(self.usages), 2),
            "total_mib": round(self.total * self.position_bytes / MIB, 3),
            "mean_reserved_mib": round(reserved / len(self.usages) * self.position_bytes / MIB, 3),
            "mean_used_mib": round(used / len(self.usages) * self.position_bytes / MIB, 3),
            "reserved_share_of_total": round(reserved / everything, 4),
            "used_share_of_total": round(used / everything, 4),
            "used_share_of_reserved": round(used / reserved, 4),
            "reserved_positions": [one.reserved for one in self.usages],
            "used_positions": [one.used for one in self.usages],
        }


def held_positions(records: Iterable[StepRecord]) -> Iterator[dict[str, int]]:
    """Yield, for each step, the cache positions of each running request at its end, before requests
    leave.
    """
    held: dict[str, int] = {}
    for record in records:
        for request_id, _ in record.preempted:
            del held[request_id]
        for row in record.rows:
            held[row.request_id] = row.start + row.num_tokens
        yield dict(held)
        for request_id, _, _ in record.finished:
            del held[request_id]


def usages(way: Way, records: Sequence[StepRecord], context: int, block_size: int) -> tuple[Usage, ...]:
    """Return reserved and used positions of each step. context: the longest request's positions.
    Requests have one choice.
    """
    batch: set[str] = set()
    result = []
    for record, held in zip(records, held_positions(records), strict=True):
        if way is Way.STATIC:
            batch |= held.keys()
            reserved = len(batch) * context
            if len(record.finished) == len(held):
                batch = set()
        elif way is Way.CONTIGUOUS:
            reserved = len(held) * context
        else:
            # The record has the pool's state after the step, when finished requests have freed
            # their blocks.
            given_back = sum(-(-held[request_id] // block_size) for request_id, _, _ in record.finished)
            reserved = (record.stats.blocks_used + given_back) * block_size
        result.append(Usage(reserved, sum(held.values()), len(held)))
    return tuple(result)


def run(
    job: CompareJob, most_running: int, begin: Callable[[Way], OnTokens] = lambda _: lambda _: None
) -> dict[Way, MemoryRun]:
    """Run the job in all ways, one after another. most_running: slots of the paged run, so many
    that memory is the limit.

    `begin` is called with each way; the function it returns is called after each step with the
    number of new tokens. Raises `ConfigError` if the model cannot be loaded.
    """
    from serve_app.experiments.compare_runs import generate_all, load_packed_model, packed_engine

    assert job.context is not None
    model = load_packed_model(job)
    results = {}
    for way in Way:
        records: list[StepRecord] = []
        slots = most_running if way is Way.PAGED else job.slots
        engine = packed_engine(model, replace(job, slots=slots), records)
        generate_all(engine, job, begin(way), batch_size=job.slots if way is Way.STATIC else None)
        block_size = model.block_size
        results[way] = MemoryRun(
            usages(way, records, job.context, block_size),
            total=records[0].stats.blocks_total * block_size,
            position_bytes=model.kv_bytes_per_block() // block_size,
        )
    return results


def report(results: dict[Way, MemoryRun]) -> dict[str, Any]:
    """Return the figures as plain data."""
    return {way.value: result.report() for way, result in results.items()}


def show(console: Console, results: dict[Way, MemoryRun]) -> None:
    """Print the figures as a table."""
    table = Table("", "steps", "running", "reserved MiB", "used MiB", "used of reserved", "used of all")
    for column in table.columns[1:]:
        column.justify = "right"
    for way, result in results.items():
        figures = result.report()
        table.add_row(
            way.value,
            str(figures["steps"]),
            f"{figures['mean_running']:.1f}",
            f"{figures['mean_reserved_mib']:.1f}",
            f"{figures['mean_used_mib']:.1f}",
            f"{figures['used_share_of_reserved']:.0%}",
            f"{figures['used_share_of_total']:.0%}",
        )
    console.print(table)
    console.print("Means over the steps of each run; the requests and the memory are the same.")


def draw(path: Path, results: dict[Way, MemoryRun]) -> None:
    """Write a PNG of reserved and used memory over steps, one panel per way on the same scales.
    Overwrites an existing file.
    """
    from serve_app.experiments.pictures import BLUE, ORANGE, save, stacked_panels

    figure, panels = stacked_panels(len(results))
    for panel, (way, result) in zip(panels, results.items(), strict=True):
        figures = result.report()
        mib = result.position_bytes / MIB
        steps = range(len(result.usages) + 1)
        reserved = [one.reserved * mib for one in result.usages]
        used = [one.used * mib for one in result.usages]
        panel.stairs(reserved, steps, fill=True, color=ORANGE, alpha=0.55, label="reserved")
        panel.stairs(used, steps, fill=True, color=BLUE, label="used")
        panel.axhline(result.total * mib, color="black", linewidth=1, linestyle="--", label="all KV memory")
        panel.set_title(
            f"{TITLES[way]}\n{figures['mean_running']:.1f} requests run on average; "
            f"{figures['used_share_of_reserved']:.0%} of what is reserved is used",
            loc="left",
            fontsize=10,
        )
        panel.set_ylabel("MiB")
        panel.set_ylim(0, result.total * mib * 1.12)
        percent = panel.secondary_yaxis("right", functions=_percent_of(result.total * mib))
        percent.set_ylabel("% of all")
    panels[-1].set_xlabel("step (one forward pass of the model)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    save(figure, path)


def _percent_of(total: float) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    return lambda value: value / total * 100, lambda percent: percent * total / 100
