"""The routing policy: a request goes to the replica that has most of its prompt computed, unless it is too busy.

Pure: no clock, nothing that waits. What a replica holds is what was sent there, under the names the engine itself gives
to blocks (`core.prefix_cache`), corrected by what the engine then says it found. State is that of one ingress process;
what other ingresses send shows in the replicas' own reports of their load.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from serve_app.fleet.load import ReplicaLoad
from serve_app.fleet.routing_policy import ReplicaInfo, RoutingRequest

# What a replica's load costs a newcomer, in prompt tokens to compute. Tuned on simulated engines
# (tests/fleet/simulated_fleet.py), from idle to twice as many requests as slots.
_TOKENS_PER_SEQUENCE = 32
"""Every running sequence makes each step longer."""
_TOKENS_PER_SEQUENCE_TOO_MANY = 64
"""A sequence beyond the slots has to wait until another one ends."""
_SHARE_OF_WAITING_TOKENS = 0.25
"""Prompts ahead of this one delay only it; its own prompt also delays everyone after it."""
_LOAD_IS_FRESH_S = 5.0
"""Older reports of a load are ignored. Heartbeats come every second."""
_MAX_BLOCKS = 65_536
_MAX_SESSIONS = 65_536


class PrefixIndex:
    """Block hashes of one replica's prefix cache, least recently used first, at most as many as its pool has blocks.

    With each hash stands the logical time at which the block was last known to be computed; 0: only expected.
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
class _Replica:
    """The policy's account of a replica. last_routed: the logical time at which it was last given a request.

    sequences, waiting_tokens: of the attempts that are placed there and not over. limit: how many sequences it had from
    this process when it last refused one, at `refused_at` (seconds).
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

    def num_sequences(self, load: ReplicaLoad | None) -> int:
        """Those of this process, or, where `load` tells of more, all that run or wait there."""
        return max(self.sequences, load.running + load.waiting if load is not None else 0)

    def takes(self, request: RoutingRequest, load: ReplicaLoad | None, now: float) -> bool:
        """Whether `request` may come now. One of more choices than there are slots takes them all."""
        if self.is_full(now):
            return False
        needed = min(request.num_sequences, self.info.max_num_seqs)
        return not request.needs_slot or self.num_sequences(load) + needed <= self.info.max_num_seqs


@dataclass(slots=True)
class PrefixPlacement:
    """`Placement`. expected: logical times of the blocks that should be cached; waiting_tokens: to be computed."""

    request: RoutingRequest
    expected: list[int]
    waiting_tokens: int
    _replica: _Replica
    _clock: Iterator[int]
    _is_over: bool = False

    def started(self, num_cached_tokens: int) -> None:
        """Fewer cached than expected: the engine evicted blocks, and those unused for longer before the missing one."""
        if self._is_over:
            return
        now, replica = next(self._clock), self._replica
        replica.waiting_tokens -= self.waiting_tokens
        self.waiting_tokens = 0
        size = replica.info.block_size
        # Of output that an earlier attempt left, the engine does not say what it found.
        expected = self.expected[: (self.request.num_prompt_tokens - 1) // size]
        missing = expected[num_cached_tokens // size :]
        # What was still being computed when this one came is no sign of an eviction.
        if missing and missing[0] > 0:
            replica.index.forget_older(missing[0])
        replica.index.confirm(self.request.block_hashes(size), now)

    def refused(self, now: float) -> None:
        """The replica gets no more than it has without this one."""
        if not self._is_over:
            self._replica.limit = self._replica.sequences - self.request.num_sequences
            self._replica.refused_at = now

    def ended(self) -> None:
        """Take it off the replica's account."""
        if not self._is_over:
            self._is_over = True
            self._replica.sequences -= self.request.num_sequences
            self._replica.waiting_tokens -= self.waiting_tokens


class PrefixRouting:
    """`RoutingPolicy`. Work per call: one hash per block of the request, one look-up per replica and matching block."""

    def __init__(self) -> None:
        self._clock = count(1)
        self._replicas: dict[str, _Replica] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def update(self, replicas: Mapping[str, ReplicaInfo]) -> None:
        """A new replica holds nothing.

        One that is not there any more is forgotten with all that it held, once it has no attempt: some come back at
        once.
        """
        kept = {name: replica for name, replica in self._replicas.items() if name in replicas or replica.sequences}
        new = {name: _Replica(info) for name, info in replicas.items() if name not in kept}
        self._replicas = kept | new

    def rank(
        self, request: RoutingRequest, candidates: Iterable[str], loads: Mapping[str, ReplicaLoad], now: float
    ) -> list[str]:
        """Full ones are left out; a replica without room for the prompt comes after all that have it.

        Then the session's own replica is first, if it has a free slot. Then comes the lowest cost: prompt tokens to
        compute, plus the replica's load in the same unit. Of equals, the one that was chosen least recently.
        """
        home = self._sessions.get(request.session) if request.session is not None else None
        keys = {}
        for name in candidates:
            replica, load = self._replicas.get(name), _fresh(loads.get(name), now)
            if replica is not None and replica.takes(request, load, now):
                keys[name] = self._key(request, name, replica, home, load)
        return sorted(keys, key=keys.__getitem__)

    def place(self, request: RoutingRequest, replica_id: str) -> PrefixPlacement:
        """Put it on the replica's account."""
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
        """Sequences and prompt tokens on the account, blocks taken for cached, and how many sequences were too many."""
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
    # An engine always computes the last token: it yields the next.
    limit = (len(request.token_ids) - 1) // size
    return len(replica.index.match(request.block_hashes(size)[:limit])) * size


def _fresh(load: ReplicaLoad | None, now: float) -> ReplicaLoad | None:
    return load if load is not None and now - load.at <= _LOAD_IS_FRESH_S else None
