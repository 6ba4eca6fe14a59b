"""Which engine replica a request goes to: the one that has most of its prompt computed, unless it is too busy.

Pure policy: no Ray, no clock, nothing that waits. Decides the order of the replicas it is given; who may be given is
`replica_set`'s decision. What a replica holds is what was sent there, under the names the engine itself gives to blocks
(`core.prefix_cache`), corrected by what the engine then says it found. State is that of one ingress process; what other
ingresses send shows in the replicas' own reports of their load.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_app.core.prefix_cache import hash_block, root_hash
from serve_app.serving.replica_set import ReplicaLoad

# What a replica's load costs a newcomer, in prompt tokens to compute. The figures did best over simulated engines
# (tests/serving/simulated_fleet.py), from idle to twice as many requests as seats.
_TOKENS_PER_SEQUENCE = 32
"""Every running sequence makes each step longer."""
_TOKENS_PER_SEQUENCE_TOO_MANY = 64
"""And one for which there is no seat waits for another's end."""
_SHARE_OF_WAITING_TOKENS = 0.25
"""Prompts that are computed first delay only this one; its own prompt delays everybody who comes after, too."""
_LOAD_IS_FRESH_S = 5.0
"""An older report of a replica's load says nothing any more. Reports come every second or two."""
_MAX_BLOCKS = 65_536
_MAX_SESSIONS = 65_536


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What never changes about a replica. num_blocks: of its KV pool; 0 = it keeps no prefixes."""

    block_size: int
    num_blocks: int
    max_num_seqs: int

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "ReplicaInfo":
        """As `record_replica_metadata` said it."""
        info = metadata["info"]
        num_blocks = info["num_blocks"] if metadata["prefix_cache"] else 0
        return cls(info["block_size"], num_blocks, metadata["max_num_seqs"])


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """One attempt at a request, as far as its place matters.

    token_ids: all that are known, prompt first, then the output of earlier attempts (of the first choice: the others
    share its prompt). reads_cache: False where every token must be computed (logprobs of the prompt).
    """

    attempt_id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    num_sequences: int = 1
    cache_salt: str = ""
    session: str | None = None
    reads_cache: bool = True
    _hashes: dict[int, list[bytes]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def block_hashes(self, block_size: int) -> list[bytes]:
        """The names of its full blocks of `block_size` tokens, computed once."""
        hashes = self._hashes.get(block_size)
        if hashes is None:
            hashes, parent = [], root_hash(self.cache_salt)
            for start in range(0, len(self.token_ids) - block_size + 1, block_size):
                parent = hash_block(parent, self.token_ids[start : start + block_size])
                hashes.append(parent)
            self._hashes[block_size] = hashes
        return hashes


class PrefixIndex:
    """Block names of one replica's prefix cache, least recently used first, at most as many as its pool has blocks.

    Each name carries the time (of a counter) at which the block was last known to be computed, 0 = only expected.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._computed_at: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._computed_at)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The times of the longest chain of leading blocks that are there or expected to be."""
        times: list[int] = []
        for block_hash in hashes:
            time = self._computed_at.get(block_hash)
            if time is None:
                break
            times.append(time)
        return times

    def expect(self, hashes: Sequence[bytes]) -> None:
        """These blocks will be there soon. A prompt longer than the pool keeps its beginning."""
        self._touch(hashes, None)

    def confirm(self, hashes: Sequence[bytes], now: int) -> None:
        """These blocks are there."""
        self._touch(hashes, now)

    def forget_older(self, time: int) -> None:
        """A block last seen at `time` is gone, so those unused for longer are too."""
        old = [block_hash for block_hash, seen in self._computed_at.items() if 0 < seen <= time]
        for block_hash in old:
            del self._computed_at[block_hash]

    def _touch(self, hashes: Sequence[bytes], time: int | None) -> None:
        # Last block first, so that of a chain the end is forgotten before the beginning, without which it is no use.
        for block_hash in reversed(hashes[: self._max_blocks]):
            self._computed_at[block_hash] = self._computed_at.get(block_hash, 0) if time is None else time
            self._computed_at.move_to_end(block_hash)
        while len(self._computed_at) > self._max_blocks:
            self._computed_at.popitem(last=False)


@dataclass(slots=True)
class _Attempt:
    """A request at its replica. expected: times of the blocks that should be cached; waiting_tokens: to be computed."""

    request: RoutingRequest
    replica: "_Replica"
    expected: list[int]
    waiting_tokens: int


@dataclass(slots=True)
class _Replica:
    """What this process knows of a replica. last_routed: when (of a counter) it was last given a request.

    limit: how many sequences it had from here when it last refused one, at `refused_at`.
    """

    info: ReplicaInfo
    index: PrefixIndex = field(init=False)
    sequences: int = 0
    waiting_tokens: int = 0
    last_routed: int = 0
    limit: float = math.inf
    refused_at: float = 0.0

    def __post_init__(self) -> None:
        self.index = PrefixIndex(min(self.info.num_blocks, _MAX_BLOCKS))

    def is_full(self, now: float) -> bool:
        """Whether it would refuse: it did, when it had `limit` sequences of this process, and has no fewer now.

        Room that others leave, or a change of its knobs makes, is not seen from here. So a second after a refusal one
        more is tried, three more after two seconds, and so on.
        """
        return self.sequences >= self.limit + int((now - self.refused_at) ** 2)


class RoutingPolicy:
    """Ranks replicas for requests and learns from what became of them. Thread-safe; every call is short.

    Ray's router calls `update`, the transport `rank` and `routed`, failover `started`, `refused` and `ended`. Work per
    call: one hash per block of the request, and one look-up per replica and block that matches.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._time = 0
        self._replicas: dict[str, _Replica] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def update(self, replicas: Mapping[str, ReplicaInfo]) -> None:
        """These replicas are there now; a new one holds nothing.

        One that is not among them is forgotten with all that it held, once it has no attempt: some come back at once.
        """
        with self._lock:
            kept = {name: replica for name, replica in self._replicas.items() if name in replicas or replica.sequences}
            new = {name: _Replica(info) for name, info in replicas.items() if name not in kept}
            self._replicas = kept | new

    def rank(
        self, request: RoutingRequest, candidates: Iterable[str], loads: Mapping[str, ReplicaLoad], now: float
    ) -> list[str]:
        """The candidates that have room, best first. `now` and the loads' `at` are seconds of one clock.

        A replica without room for the prompt comes after all that have it. Then the session's own replica is first, if
        it has a free seat. Then the fewest tokens to compute count, with the replica's load taken for some more. Equals
        take turns.
        """
        with self._lock:
            known = [(n, r) for n in candidates if (r := self._replicas.get(n)) is not None and not r.is_full(now)]
            home = self._sessions.get(request.session) if request.session is not None else None
            keys = {name: self._key(request, name, r, home, _fresh(loads.get(name), now)) for name, r in known}
        return sorted(keys, key=keys.__getitem__)

    def _key(
        self, request: RoutingRequest, name: str, replica: _Replica, home: str | None, load: ReplicaLoad | None
    ) -> tuple[bool, bool, float, int]:
        sequences = max(replica.sequences, load.running + load.waiting if load is not None else 0)
        too_many = max(0, sequences + request.num_sequences - replica.info.max_num_seqs)
        missing = len(request.token_ids) - self._cached_tokens(request, replica)
        no_room = load is not None and missing > load.free_blocks * replica.info.block_size
        cost = (
            missing
            + replica.waiting_tokens * _SHARE_OF_WAITING_TOKENS
            + sequences * _TOKENS_PER_SEQUENCE
            + too_many * _TOKENS_PER_SEQUENCE_TOO_MANY
        )
        return no_room, too_many > 0 or name != home, cost, replica.last_routed

    def _cached_tokens(self, request: RoutingRequest, replica: _Replica) -> int:
        if not request.reads_cache:
            return 0
        size = replica.info.block_size
        # An engine always computes the last token: it yields the next.
        limit = (len(request.token_ids) - 1) // size
        return len(replica.index.match(request.block_hashes(size)[:limit])) * size

    def routed(self, request: RoutingRequest, replica_id: str) -> None:
        """The attempt goes to this replica."""
        with self._lock:
            replica = self._replicas.get(replica_id)
            if replica is None:
                return
            self._time += 1
            hashes = request.block_hashes(replica.info.block_size)
            waiting_tokens = len(request.token_ids) - self._cached_tokens(request, replica)
            expected = replica.index.match(hashes) if request.reads_cache else []
            self._attempts[request.attempt_id] = _Attempt(request, replica, expected, waiting_tokens)
            replica.index.expect(hashes)
            replica.last_routed = self._time
            replica.sequences += request.num_sequences
            replica.waiting_tokens += waiting_tokens
            if request.session is not None:
                self._sessions[request.session] = replica_id
                self._sessions.move_to_end(request.session)
                if len(self._sessions) > _MAX_SESSIONS:
                    self._sessions.popitem(last=False)

    def started(self, attempt_id: str, num_cached_tokens: int) -> None:
        """The attempt's first token came; its engine found `num_cached_tokens` of the prompt computed.

        Fewer than expected: the engine evicted blocks, and those unused for longer before the missing one.
        """
        with self._lock:
            attempt = self._attempts.get(attempt_id)
            if attempt is None:
                return
            self._time += 1
            replica = attempt.replica
            replica.waiting_tokens -= attempt.waiting_tokens
            attempt.waiting_tokens = 0
            size = replica.info.block_size
            # Of output that an earlier attempt left, the engine does not say what it found.
            expected = attempt.expected[: (attempt.request.num_prompt_tokens - 1) // size]
            missing = expected[num_cached_tokens // size :]
            # What was still being computed when this one came is no sign of an eviction.
            if missing and missing[0] > 0:
                replica.index.forget_older(missing[0])
            replica.index.confirm(attempt.request.block_hashes(size), self._time)

    def refused(self, attempt_id: str, now: float) -> None:
        """Its replica had no room for the attempt: it gets no more than it has without this one."""
        with self._lock:
            if (attempt := self._attempts.get(attempt_id)) is not None:
                attempt.replica.limit = attempt.replica.sequences - attempt.request.num_sequences
                attempt.replica.refused_at = now

    def ended(self, attempt_id: str) -> None:
        """The attempt is over, in whatever way. Idempotent."""
        with self._lock:
            attempt = self._attempts.pop(attempt_id, None)
            if attempt is not None:
                attempt.replica.sequences -= attempt.request.num_sequences
                attempt.replica.waiting_tokens -= attempt.waiting_tokens


def _fresh(load: ReplicaLoad | None, now: float) -> ReplicaLoad | None:
    return load if load is not None and now - load.at <= _LOAD_IS_FRESH_S else None


policy = RoutingPolicy()
"""This process's one. Reach it through the module: Ray copies the router by value, and what it imported by name too."""
