"""Growth of the processes' resources in a long run, and its picture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

_SETTLED_AFTER_S = 900.0
_LIMIT = 1.05
_AGE_STEP_S = 60.0
_ROLES = ("ingress", "proxy", "controller", "replica")
_HELD = {"rss_mib": "resident memory, MiB", "fds": "descriptors", "threads": "threads"}
_MUST_BE_NONE = ("failed", "lost_tokens", "doubled_tokens", "unequal")


@dataclass(frozen=True)
class Sample:
    """The resources of one process at one time."""

    at_s: float
    """In seconds since the start of the run."""
    role: str
    pid: int
    age_s: float
    rss_mib: float
    fds: int
    threads: int


def growth(samples: Sequence[Sample], held: Callable[[Sample], float]) -> float | None:
    """Return the factor by which a resource grew; None if the run is too short.

    One process: the last third over the first. Processes that replaced each other: the later half
    of them over the earlier half, at equal age.
    """
    born = {sample.pid: sample.at_s - sample.age_s for sample in reversed(samples)}
    pids = sorted(born, key=lambda pid: born[pid])
    if len(pids) == 1:
        third = (samples[-1].at_s - samples[0].at_s) / 3
        early = [held(sample) for sample in samples if sample.at_s < samples[0].at_s + third]
        late = [held(sample) for sample in samples if sample.at_s > samples[-1].at_s - third]
        return median(late) / median(early) if early and late else None
    older, younger = (_by_age(samples, half, held) for half in (pids[: len(pids) // 2], pids[len(pids) // 2 :]))
    ages = older.keys() & younger.keys()
    return fmean(younger[age] for age in ages) / fmean(older[age] for age in ages) if ages else None


def growths(samples: Sequence[Sample]) -> dict[str, dict[str, float | None]]:
    """Return the growth by role and resource, once the run has settled."""
    settled = [sample for sample in samples if sample.at_s >= _SETTLED_AFTER_S]
    by_role = {role: [sample for sample in settled if sample.role == role] for role in _ROLES}
    return {
        role: {name: growth(of_role, lambda sample, name=name: getattr(sample, name)) for name in _HELD}  # type: ignore[misc]
        for role, of_role in by_role.items()
        if of_role
    }


def verdict(figures: dict[str, Any]) -> list[str]:
    """Return the expectations that the figures miss, as sentences."""
    faults = [f"{figures[name]} {name.replace('_', ' ')}" for name in _MUST_BE_NONE if figures[name]]
    faults += [f"an update ended with {said!r}" for _, said in figures["updates"] if said != "deployed"]
    faults += [f"the run itself broke: {problem}" for problem in figures["broken"]]
    for role, held in figures["growths"].items():
        faults += [f"{role}: {name} grew by {f - 1:.1%}" for name, f in held.items() if f is not None and f > _LIMIT]
    if not figures["growths"]:
        faults.append(f"a run of {figures['seconds']:.0f} s does not show how the processes grow")
    return faults


def draw(figures: dict[str, Any], path: Path) -> None:
    """Write a PNG of every process's resources over time, with kills (thin lines) and updates
    (thick)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from serve_app.workloads.plots import COLOURS, GREY, new_figure

    figure, axes = new_figure(height=4, columns=len(_HELD))
    lines: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for sample in figures["samples"]:
        lines.setdefault((sample["role"], sample["pid"]), []).append(sample)
    for one, (name, label) in zip(axes, _HELD.items(), strict=True):
        for at in figures["kills"]:
            one.axvline(at / 60, color=GREY, linewidth=0.3)
        for at, _ in figures["updates"]:
            one.axvline(at / 60, color=GREY, linewidth=1.5, alpha=0.5)
        for (role, _), samples in lines.items():
            colour = COLOURS[_ROLES.index(role)]
            one.plot([s["at_s"] / 60 for s in samples], [s[name] for s in samples], color=colour, linewidth=1)
        one.set(title=label, xlabel="minutes", ylim=(0, None))
    for index, role in enumerate(_ROLES):
        axes[0].plot([], [], color=COLOURS[index], label=role)
    axes[0].legend(frameon=False)
    FigureCanvasAgg(figure).print_png(path)


def _by_age(samples: Sequence[Sample], pids: Sequence[int], held: Callable[[Sample], float]) -> dict[int, float]:
    """Return the median of these processes' resource by minute of age, without the first, which is
    loading."""
    ages: dict[int, list[float]] = {}
    for sample in samples:
        if sample.pid in pids and sample.age_s >= _AGE_STEP_S:
            ages.setdefault(int(sample.age_s // _AGE_STEP_S), []).append(held(sample))
    return {age: median(values) for age, values in ages.items()}
