"""Interface between the transport and a routing policy, which chooses a request's replica.

A policy orders the replicas it is given; `ReplicaSet` decides which are allowed. It is passed to
the transport and runs on the transport's event loop.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from serve_app.core.prefix_cache import hash_block, root_hash
from serve_app.core.request import EngineRequest
from serve_app.fleet.load import ReplicaLoad


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """Constant facts about a replica. num_blocks: of its KV pool; 0 = no prefix cache."""

    block_size: int
    num_blocks: int
    max_num_seqs: int

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "ReplicaInfo":
        """Build it from the result of `record_replica_metadata`."""
        info = metadata["info"]
        num_blocks = info["num_blocks"] if metadata["prefix_cache"] else 0
        return cls(info["block_size"], num_blocks, metadata["max_num_seqs"])


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """The parts of a request that matter for routing.

    - token_ids: all known tokens, prompt first, then the output of earlier attempts (of one choice:
      the others share its prompt).
    - reads_cache: False if every token must be computed (logprobs of the prompt).
    - needs_slot: a replica without a free slot for it counts as full.
    """

    token_ids: Sequence[int]
    num_prompt_tokens: int
    num_sequences: int = 1
    cache_salt: str = ""
    session: str | None = None
    reads_cache: bool = True
    needs_slot: bool = False
    _hashes: dict[int, list[bytes]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, request: EngineRequest, session: str | None = None, *, needs_slot: bool = False) -> "RoutingRequest":
        """Return the parts of `request` that a policy reads."""
        prior = max(request.prior_output_ids, key=len, default=())
        return cls(
            token_ids=(*request.prompt_token_ids, *prior),
            num_prompt_tokens=len(request.prompt_token_ids),
            num_sequences=request.params.n,
            cache_salt=request.cache_salt,
            session=session,
            reads_cache=not request.params.wants_whole_prompt,
            needs_slot=needs_slot,
        )

    def block_hashes(self, block_size: int) -> list[bytes]:
        """Return the hashes of its full blocks of `block_size` tokens. Computed once."""
        hashes = self._hashes.get(block_size)
        if hashes is None:
            hashes, parent = [], root_hash(self.cache_salt)
            for start in range(0, len(self.token_ids) - block_size + 1, block_size):
                parent = hash_block(parent, self.token_ids[start : start + block_size])
                hashes.append(parent)
            self._hashes[block_size] = hashes
        return hashes


class Placement(Protocol):
    """A policy's record of one attempt at one replica. Methods must neither block nor raise."""

    def started(self, num_cached_tokens: int) -> None:
        """The first token came. The engine found `num_cached_tokens` of the prompt in its cache."""

    def refused(self, now: float) -> None:
        """The replica had no room for the attempt. `now` is in monotonic seconds."""

    def ended(self) -> None:
        """The attempt has ended, started or not. Idempotent."""


class RoutingPolicy(Protocol):
    """Ranks replicas and learns from the results. Not thread-safe; calls are short."""

    def update(self, replicas: Mapping[str, ReplicaInfo]) -> None:
        """Set the current replicas, by id."""

    def rank(
        self, request: RoutingRequest, candidates: Iterable[str], loads: Mapping[str, ReplicaLoad], now: float
    ) -> list[str]:
        """Return the candidates with room, best first.

        `now` and `load.at` are seconds of one clock.
        """

    def place(self, request: RoutingRequest, replica_id: str) -> Placement:
        """Record that the request goes to this replica, which `rank` has just returned."""

    def account(self, replica_id: str) -> dict[str, float | None]:
        """Return the policy's record of the replica, for operators; empty if unknown."""
