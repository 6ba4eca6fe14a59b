"""Routing policy: prefer the replica with most of the prompt cached, unless it is too busy.

Pure: no clock, no waiting. A replica is assumed to cache what was sent to it. Blocks have the
engine's own hashes (`core.prefix_cache`), and the cached tokens that the engine reports correct the
assumption. State is per ingress process; load from other ingresses shows in the replicas' own
reports.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from serve_app.fleet.load import ReplicaLoad
from serve_app.fleet.routing_policy import ReplicaInfo, RoutingRequest

# Cost of a replica's load for a new request, in prompt tokens to compute. Tuned on simulated
# engines (tests/fleet/simulated_fleet.py), from idle to twice as many requests as slots.
_TOKENS_PER_SEQUENCE = 32
"""Every running sequence makes each step longer."""
_TOKENS_PER_SEQUENCE_TOO_MANY = 64
"""A sequence beyond the slots waits until another one ends."""
_SHARE_OF_WAITING_TOKENS = 0.25
"""Prompts ahead of a request delay only this request; its own prompt also delays all later ones."""
_LOAD_IS_FRESH_S = 5.0
"""Older load reports are ignored. Heartbeats come every second."""
_MAX_BLOCKS = 65_536
_MAX_SESSIONS = 65_536


class PrefixIndex:
    """Block hashes in one replica's prefix cache, least recently used first.

    At most as many as its pool has blocks. Each hash has the logical time at which the block was
    last known to be computed; 0 means only expected.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._computed_at: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._computed_at)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the times of the longest chain of leading blocks that are cached or expected."""
        times: list[int] = []
        for block_hash in hashes:
            time = self._computed_at.get(block_hash)
            if time is None:
                break
            times.append(time)
        return times

    def expect(self, hashes: Sequence[bytes]) -> None:
        """Record blocks that will be computed soon.

        Of a prompt longer than the pool, keeps the beginning.
        """
        self._touch(hashes, None)

    def confirm(self, hashes: Sequence[bytes], now: int) -> None:
        """Record blocks that are computed."""
        self._touch(hashes, now)

    def forget_older(self, time: int) -> None:
        """Forget blocks last seen at `time` or earlier.

        One of them is gone, so the older ones are too.
        """
        old = [block_hash for block_hash, seen in self._computed_at.items() if 0 < seen <= time]
        for block_hash in old:
            del self._computed_at[block_hash]

    def _touch(self, hashes: Sequence[bytes], time: int | None) -> None:
        # Last block first, so that the end of a chain is evicted before its beginning. An end is
        # useless without the beginning.
        for block_hash in reversed(hashes[: self._max_blocks]):
            self._computed_at[block_hash] = self._computed_at.get(block_hash, 0) if time is None else time
            self._computed_at.move_to_end(block_hash)
        while len(self._computed_at) > self._max_blocks:
            self._computed_at.popitem(last=False)


@dataclass(slots=True)
class _Replica:
    """The policy's record of a replica.

    - last_routed: logical time of the last request placed here.
    - sequences, waiting_tokens: of the placed attempts that have not ended.
    - limit: sequences of this process that it had when it last refused one, at `refused_at`
      (seconds).
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
        """Whether the replica would refuse a request, judging by its last refusal.

        It is full while it has at least `limit` sequences of this process. This process cannot see
        when other ingresses' sequences end or the knobs change. So 1 s after a refusal it tries one
        sequence beyond the limit, after 2 s up to four, and so on.
        """
        return self.sequences >= self.limit + int((now - self.refused_at) ** 2)

    def num_sequences(self, load: ReplicaLoad | None) -> int:
        """Return this process's sequences, or those that `load` reports if these are more."""
        return max(self.sequences, load.running + load.waiting if load is not None else 0)

    def takes(self, request: RoutingRequest, load: ReplicaLoad | None, now: float) -> bool:
        """Whether `request` may be placed now.

        A request with more choices than slots needs all slots.
        """
        if self.is_full(now):
            return False
        needed = min(request.num_sequences, self.info.max_num_seqs)
        return not request.needs_slot or self.num_sequences(load) + needed <= self.info.max_num_seqs


@dataclass(slots=True)
class PrefixPlacement:
    """`Placement` of `PrefixRouting`.

    expected: logical times of the blocks that should be cached; waiting_tokens: tokens to compute.
    """

    request: RoutingRequest
    expected: list[int]
    waiting_tokens: int
    _replica: _Replica
    _clock: Iterator[int]
    _is_over: bool = False

    def started(self, num_cached_tokens: int) -> None:
        """Correct the index: if fewer tokens were cached than expected, the engine evicted blocks.

        It evicted those unused for longer before the missing one.
        """
        if self._is_over:
            return
        now, replica = next(self._clock), self._replica
        replica.waiting_tokens -= self.waiting_tokens
        self.waiting_tokens = 0
        size = replica.info.block_size
        # The engine does not report cached blocks of an earlier attempt's output.
        expected = self.expected[: (self.request.num_prompt_tokens - 1) // size]
        missing = expected[num_cached_tokens // size :]
        # A block that was still being computed when this request came does not prove an eviction.
        if missing and missing[0] > 0:
            replica.index.forget_older(missing[0])
        replica.index.confirm(self.request.block_hashes(size), now)

    def refused(self, now: float) -> None:
        """Limit the replica to the sequences that it has without this request."""
        if not self._is_over:
            self._replica.limit = self._replica.sequences - self.request.num_sequences
            self._replica.refused_at = now

    def ended(self) -> None:
        """Remove the attempt from the replica's record."""
        if not self._is_over:
            self._is_over = True
            self._replica.sequences -= self.request.num_sequences
            self._replica.waiting_tokens -= self.waiting_tokens


class PrefixRouting:
    """`RoutingPolicy` by cached prefix.

    Cost per call: one hash per block of the request, and one look-up per replica and matching
    block.
    """

    def __init__(self) -> None:
        self._clock = count(1)
        self._replicas: dict[str, _Replica] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def update(self, replicas: Mapping[str, ReplicaInfo]) -> None:
        """Add new replicas, with nothing cached, and forget those that are gone.

        A replica is forgotten only when it has no attempts, because some return at once.
        """
        kept = {name: replica for name, replica in self._replicas.items() if name in replicas or replica.sequences}
        new = {name: _Replica(info) for name, info in replicas.items() if name not in kept}
        self._replicas = kept | new

    def rank(
        self, request: RoutingRequest, candidates: Iterable[str], loads: Mapping[str, ReplicaLoad], now: float
    ) -> list[str]:
        """Rank the replicas that are not full; those without KV blocks for the prompt come last.

        The session's own replica is first if it has a free slot. The others are ordered by cost:
        prompt tokens to compute, plus the replica's load in the same unit. Ties go to the least
        recently chosen.
        """
        home = self._sessions.get(request.session) if request.session is not None else None
        keys = {}
        for name in candidates:
            replica, load = self._replicas.get(name), _fresh(loads.get(name), now)
            if replica is not None and replica.takes(request, load, now):
                keys[name] = self._key(request, name, replica, home, load)
        return sorted(keys, key=keys.__getitem__)

    def place(self, request: RoutingRequest, replica_id: str) -> PrefixPlacement:
        """Record the request at the replica."""
        replica = self._replicas[replica_id]
        hashes = request.block_hashes(replica.info.block_size)
        waiting_tokens = len(request.token_ids) - _cached_tokens(request, replica)
        expected = replica.index.match(hashes) if request.reads_cache else []
        replica.index.expect(hashes)
        replica.last_routed = next(self._clock)
        replica.sequences += request.num_sequences
        replica.waiting_tokens += waiting_tokens
        if request.session is not None:
            self._sessions[request.session] = replica_id
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return PrefixPlacement(request, expected, waiting_tokens, replica, self._clock)

    def account(self, replica_id: str) -> dict[str, float | None]:
        """Return the replica's sequences, waiting prompt tokens, known blocks and refusal limit."""
        if (replica := self._replicas.get(replica_id)) is None:
            return {}
        return {
            "sequences": replica.sequences,
            "waiting_tokens": replica.waiting_tokens,
            "known_blocks": len(replica.index),
            "refused_beyond": None if math.isinf(replica.limit) else replica.limit,
        }

    def _key(
        self, request: RoutingRequest, name: str, replica: _Replica, home: str | None, load: ReplicaLoad | None
    ) -> tuple[bool, bool, float, int]:
        sequences = replica.num_sequences(load)
        too_many = max(0, sequences + request.num_sequences - replica.info.max_num_seqs)
        missing = len(request.token_ids) - _cached_tokens(request, replica)
        no_room = load is not None and missing > load.free_blocks * replica.info.block_size
        cost = (
            missing
            + replica.waiting_tokens * _SHARE_OF_WAITING_TOKENS
            + sequences * _TOKENS_PER_SEQUENCE
            + too_many * _TOKENS_PER_SEQUENCE_TOO_MANY
        )
        return no_room, too_many > 0 or name != home, cost, replica.last_routed


def _cached_tokens(request: RoutingRequest, replica: _Replica) -> int:
    if not request.reads_cache:
        return 0
    size = replica.info.block_size
    # An engine always computes the last token, which yields the next one.
    limit = (len(request.token_ids) - 1) // size
    return len(replica.index.match(request.block_hashes(size)[:limit])) * size


def _fresh(load: ReplicaLoad | None, now: float) -> ReplicaLoad | None:
    return load if load is not None and now - load.at <= _LOAD_IS_FRESH_S else None
