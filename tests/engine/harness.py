"""Runs requests through an `EngineCore` and collects what came out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_app.core.request import EngineRequest
from serve_app.core.results import FinishReason, TokenLogprob
from serve_app.core.step_record import StepRecord
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.grammars.token_set import Vocabulary
from serve_app.model.paged_model import PagedModel
from serve_app.model.profiling.memory import GIB


@dataclass
class Outcome:
    """One choice. `offsets` are those of the deltas, to see that they are contiguous."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    embedding: bytes | None = None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    error: str | None = None


@dataclass
class Run:
    """All choices by (request id, choice), and what the steps were."""

    outcomes: dict[tuple[str, int], Outcome]
    records: list[StepRecord]

    @property
    def num_preemptions(self) -> int:
        return sum(len(record.preempted) for record in self.records)

    @property
    def num_hit_tokens(self) -> int:
        return sum(record.prefix_hit_tokens for record in self.records)


class Harness:
    """An engine with its recorded steps. `num_blocks` (None: plenty) is the size of the KV pool."""

    def __init__(
        self, model: PagedModel, num_blocks: int | None = None, vocabulary: Vocabulary | None = None, **config: Any
    ) -> None:
        blocks = 512 if num_blocks is None else num_blocks
        # The runner keeps a block; half a block more, so that rounding cannot cost one.
        kv_cache_gib = (blocks + 1.5) * model.kv_bytes_per_block() / GIB
        self.records: list[StepRecord] = []
        self.core = EngineCore(
            model,
            EngineConfig(kv_cache_gib=kv_cache_gib, **config),
            on_step=self.records.append,
            vocabulary=None if vocabulary is None else lambda: vocabulary,
        )
        assert self.core.info.num_blocks == blocks

    def run(self, requests: Sequence[EngineRequest]) -> Run:
        """Run to the end, starting all at once; the books are checked after each step."""
        first = len(self.records)
        outcomes: dict[tuple[str, int], Outcome] = {}
        for request in requests:
            for choice in range(request.params.n):
                outcomes[request.request_id, choice] = Outcome()
            self.core.add(request)
        prior = {
            (request.request_id, choice): len(ids)
            for request in requests
            for choice, ids in enumerate(request.prior_output_ids)
        }
        while self.core.has_unfinished:
            deltas = self.core.step()
            self.core.check_invariants()
            assert deltas is not None
            for delta in deltas:
                key = delta.request_id, delta.choice
                outcome = outcomes[key]
                assert outcome.finish_reason is None
                assert delta.offset == prior.get(key, 0) + len(outcome.token_ids)
                outcome.token_ids += delta.token_ids
                outcome.logprobs += delta.logprobs
                outcome.prompt_logprobs += delta.prompt_logprobs
                outcome.embedding = delta.embedding
                outcome.finish_reason = delta.finish_reason
                outcome.error = None if delta.error is None else delta.error.message
                if delta.num_cached_tokens is not None:
                    outcome.num_cached_tokens = delta.num_cached_tokens
        stats = self.core.stats()
        assert (stats.waiting, stats.running, stats.blocks_used) == (0, 0, 0)
        return Run(outcomes, self.records[first:])
