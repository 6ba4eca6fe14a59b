"""Reports why the server was unavailable: deaths of Ray's actors, and changes of readiness.

Actors are replicas, ingress, controller and proxies. Each report is one line, with the cause if Ray
or the kernel report it. Decides when the server cannot recover.
"""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

from serve_app.errors import one_line
from serve_app.launch.bounded import BoundedCalls
from serve_app.serving.ray_patches import Actor, actors
from serve_app.system.http_client import HttpStatusError, fetch

_PERIOD_S = 1.0
_TIMEOUT_S = 1.0
_ANSWER_S = 10.0
"""Timeout for Ray, which may never answer without its GCS."""
_MOST_REFUSED_S = 30.0
"""Serve restarts its proxy within seconds; see `keep_haproxy_running` for HAProxy."""
_VMSTAT = Path("/proc/vmstat")
_INTENDED = re.compile(r"exit type: INTENDED|exit_actor")
_DETAIL = re.compile(r"exit detail: (.*?)(?: Some common causes| There are some potential| Worker exit|$)", re.DOTALL)


class Watch:
    """Checks `url` and Ray's table of actors once a second. `say` prints a line."""

    def __init__(self, url: str, say: Callable[[str], None], given_up: Callable[[], bool] = lambda: False) -> None:
        """`given_up`: whether to stop waiting for Ray."""
        self._url = url
        self._say = say
        self._given_up = given_up
        self._rays = BoundedCalls(say)
        self._next_look = 0.0
        self._away_since: float | None = None
        self._refused_since: float | None = None
        self._restarts: dict[str, int] = {}
        self._dead: set[str] = set()
        self._oom_kills = _count_oom_kills()
        self._note_actors(report=False)

    def look(self) -> str | None:
        """Report changes since the last check, at most once a second.

        Returns a line if the server has been unreachable for too long to recover, else None.
        """
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + _PERIOD_S
        self._note_actors(report=True)
        self._note_readiness(now)
        if self._refused_since is None or now - self._refused_since < _MOST_REFUSED_S:
            return None
        return f"{self._url} has accepted no connection for {now - self._refused_since:.0f} s: its proxy does not start"

    def _note_actors(self, *, report: bool) -> None:
        kills, before = _count_oom_kills(), self._oom_kills
        self._oom_kills = kills
        try:
            table = self._rays.call(actors, _ANSWER_S, self._given_up)
        except Exception:  # any of Ray's errors: readiness is reported even without the table
            return
        for actor in table:
            died = actor.dead and actor.actor_id not in self._dead
            died = died or actor.restarts > self._restarts.get(actor.actor_id, 0)
            self._restarts[actor.actor_id] = actor.restarts
            if actor.dead:
                self._dead.add(actor.actor_id)
            if died and report and actor.crashed and not _INTENDED.search(actor.cause):
                self._say(f"{_name(actor)} (pid {actor.pid}) died: {_reason(actor, kills - before)}")

    def _note_readiness(self, now: float) -> None:
        try:
            fetch(f"{self._url}/health/ready", timeout_s=_TIMEOUT_S, verify=False)
        except (OSError, ValueError) as error:
            refused = isinstance(getattr(error, "reason", error), ConnectionRefusedError)
            self._refused_since = (self._refused_since or now) if refused else None
            if self._away_since is None:
                self._away_since = now
                self._say(f"not ready: {_why(error)}")
            return
        self._refused_since = None
        if self._away_since is not None:
            self._say(f"ready again after {now - self._away_since:.1f} s")
            self._away_since = None


def _name(actor: Actor) -> str:
    """Return the deployment's name: `ServeReplica:serve_app:EngineReplica` is EngineReplica."""
    return actor.class_name.rpartition(":")[2]


def _reason(actor: Actor, oom_kills: int) -> str:
    if oom_kills:
        return f"the kernel's OOM killer killed {oom_kills} process(es) on this machine in the same second"
    detail = _DETAIL.search(" ".join(actor.cause.split()))
    return (detail[1] if detail is not None else actor.cause or "no cause given")[:300]


def _why(error: Exception) -> str:
    if isinstance(error, HttpStatusError):
        try:
            return str(json.loads(error.body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            pass
    return one_line(error)


def _count_oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since boot.

    0 if the kernel does not count them.
    """
    try:
        found = re.search(r"^oom_kill (\d+)$", _VMSTAT.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return 0 if found is None else int(found[1])
