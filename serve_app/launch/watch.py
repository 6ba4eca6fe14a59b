"""Tells why the server was away: deaths of Ray's actors (replicas, ingress, controller, proxies), and readiness.

One line each. A cause is told as far as Ray or the kernel tell it.
"""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

from serve_app.http_client import HttpStatusError, fetch
from serve_app.serving.ray_patches import Actor, actors

_PERIOD_S = 1.0
_TIMEOUT_S = 1.0
_VMSTAT = Path("/proc/vmstat")
_INTENDED = re.compile(r"exit type: INTENDED|exit_actor")
_DETAIL = re.compile(r"exit detail: (.*?)(?: Some common causes| There are some potential| Worker exit|$)", re.DOTALL)


class Watch:
    """Looks once a second, at `url` and at Ray's table of actors; `say` prints a line."""

    def __init__(self, url: str, say: Callable[[str], None]) -> None:
        self._url = url
        self._say = say
        self._next_look = 0.0
        self._away_since: float | None = None
        self._restarts: dict[str, int] = {}
        self._dead: set[str] = set()
        self._oom_kills = _count_oom_kills()
        self._note_actors(told=False)

    def look(self) -> None:
        """Tell what has changed since the last look, unless that was just now."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _PERIOD_S
        self._note_actors(told=True)
        self._note_readiness(now)

    def _note_actors(self, *, told: bool) -> None:
        kills, before = _count_oom_kills(), self._oom_kills
        self._oom_kills = kills
        try:
            table = actors()
        except Exception:  # of Ray's, whatever it is: without its table, readiness is still told
            return
        for actor in table:
            died = actor.dead and actor.actor_id not in self._dead
            died = died or actor.restarts > self._restarts.get(actor.actor_id, 0)
            self._restarts[actor.actor_id] = actor.restarts
            if actor.dead:
                self._dead.add(actor.actor_id)
            if died and told and actor.crashed and not _INTENDED.search(actor.cause):
                self._say(f"{_name(actor)} (pid {actor.pid}) died: {_reason(actor, kills - before)}")

    def _note_readiness(self, now: float) -> None:
        try:
            fetch(f"{self._url}/health/ready", timeout_s=_TIMEOUT_S, verify=False)
        except (OSError, ValueError) as error:
            if self._away_since is None:
                self._away_since = now
                self._say(f"not ready: {_why(error)}")
            return
        if self._away_since is not None:
            self._say(f"ready again after {now - self._away_since:.1f} s")
            self._away_since = None


def _name(actor: Actor) -> str:
    """`ServeReplica:serve_app:EngineReplica` is EngineReplica."""
    return actor.class_name.rpartition(":")[2]


def _reason(actor: Actor, oom_kills: int) -> str:
    if oom_kills:
        return f"the kernel ended {oom_kills} process(es) of this machine in the same second, for want of memory"
    detail = _DETAIL.search(" ".join(actor.cause.split()))
    return (detail[1] if detail is not None else actor.cause or "no cause given")[:300]


def _why(error: Exception) -> str:
    if isinstance(error, HttpStatusError):
        try:
            return str(json.loads(error.body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            pass
    return " ".join(str(error).split())[:300]


def _count_oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since it started; 0 where it does not count them."""
    try:
        found = re.search(r"^oom_kill (\d+)$", _VMSTAT.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return 0 if found is None else int(found[1])
