"""The running sequences as used by sampling: their slots, and the rows of a step that sample."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from serve_app.core.sampling_params import SamplingParams
from serve_app.grammars.token_set import TokenSet
from serve_app.model.sampling.grammar_masks import Follower
from serve_app.model.sampling.noise import Float64Array, Int64Array


@dataclass(slots=True, eq=False)
class Slot:
    """One running sequence (a choice of a request) in its slot.

    token_ids: the slot's row of the batch's table. The first `num_tokens` ids are known, except
    those that a step in flight samples. During a step with draft tokens, the drafts follow them.
    """

    request_id: str
    choice: int
    params: SamplingParams
    num_prompt_tokens: int
    num_tokens: int
    token_ids: Int64Array
    num_blocks: int
    follower: Follower | None = None
    """Grammar state of the output, if there is a grammar."""
    pooled: Tensor | None = None
    """Sum so far of a prompt with mean pooling; see `pooling`."""

    def output_from(self, start: int) -> list[int]:
        """Return the output tokens from index `start`."""
        token_ids: list[int] = self.token_ids[self.num_prompt_tokens + start : self.num_tokens].tolist()
        return token_ids

    @property
    def num_output_tokens(self) -> int:
        """Number of known output tokens, including those of a failed-over run."""
        return self.num_tokens - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The R positions of a step where a token is sampled, in the order of its rows: after a row's
    last known token, and after each of its drafts, assuming the previous drafts are correct.

    tokens: int64 [R], index of the packed token before each position.
    seq_slots: int64 [R], slot indices.
    generations: int64 [R], number of sequences started in the slot when the step was packed.
    num_tokens: int64 [R], number of the sequence's tokens before the new one.
    slots: the R slots; see `states`.
    parameters: float64 [R, len(Column)].
    plain: bool [R], whether logits are used unchanged and no log-probabilities are requested.
    masks: token sets that grammars allow, by row; set after the forward pass.
    """

    tokens: Int64Array
    seq_slots: Int64Array
    generations: Int64Array
    num_tokens: Int64Array
    slots: Sequence[Slot]
    parameters: Float64Array
    plain: npt.NDArray[np.bool_]
    masks: dict[int, TokenSet] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether all rows are plain."""
        return bool(self.plain.all())

    def part(self, indices: Int64Array) -> "SamplingRows":
        """Return some of the rows. `indices` must be ascending."""
        chosen: list[int] = indices.tolist()
        return SamplingRows(
            self.tokens[indices],
            self.seq_slots[indices],
            self.generations[indices],
            self.num_tokens[indices],
            [self.slots[i] for i in chosen],
            self.parameters[indices],
            self.plain[indices],
            {j: self.masks[i] for j, i in enumerate(chosen) if i in self.masks},
        )

    def states(self) -> list[Slot]:
        """Return the R slots, each with the number of tokens at its position."""
        counts: list[int] = self.num_tokens.tolist()
        return [
            slot if slot.num_tokens == count else replace(slot, num_tokens=count)
            for slot, count in zip(self.slots, counts, strict=True)
        ]
