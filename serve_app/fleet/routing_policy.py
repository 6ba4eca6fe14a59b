"""Which engine replica a request goes to: what the transport asks a policy, and what it tells it.

A policy decides the order of the replicas it is given; who may be given is `ReplicaSet`'s decision. It is handed to the
transport, and lives on the transport's event loop.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from serve_app.core.prefix_cache import hash_block, root_hash
from serve_app.core.request import EngineRequest
from serve_app.fleet.load import ReplicaLoad


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
    """A request, as far as its place matters.

    token_ids: all that are known, prompt first, then the output of earlier attempts (of the first choice: the others
    share its prompt). reads_cache: False where every token must be computed (logprobs of the prompt). needs_slot: a
    replica without a free slot for it counts as full.
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
        """What a policy reads of `request`."""
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
        """The names of its full blocks of `block_size` tokens, computed once."""
        hashes = self._hashes.get(block_size)
        if hashes is None:
            hashes, parent = [], root_hash(self.cache_salt)
            for start in range(0, len(self.token_ids) - block_size + 1, block_size):
                parent = hash_block(parent, self.token_ids[start : start + block_size])
                hashes.append(parent)
            self._hashes[block_size] = hashes
        return hashes


class Placement(Protocol):
    """A policy's account of one attempt at one replica; told what becomes of it. Must neither block nor raise."""

    def started(self, num_cached_tokens: int) -> None:
        """The first token came; the engine found this many of the prompt's tokens in its cache."""

    def refused(self, now: float) -> None:
        """The replica had no room for it. `now` is in monotonic seconds."""

    def ended(self) -> None:
        """The attempt is over, started or not. Idempotent."""


class RoutingPolicy(Protocol):
    """Ranks replicas for requests, and learns from what becomes of them. For one thread; every call is short."""

    def update(self, replicas: Mapping[str, ReplicaInfo]) -> None:
        """These replicas are there now, by their ids."""

    def rank(
        self, request: RoutingRequest, candidates: Iterable[str], loads: Mapping[str, ReplicaLoad], now: float
    ) -> list[str]:
        """The candidates that have room, best first. `now` and the loads' `at` are seconds of one clock."""

    def place(self, request: RoutingRequest, replica_id: str) -> Placement:
        """The request goes to this replica, which `rank` has just named."""

    def account(self, replica_id: str) -> dict[str, float | None]:
        """What it knows of the replica, for operators; empty if it does not know it."""
