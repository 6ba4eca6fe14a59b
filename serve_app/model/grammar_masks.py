"""Which tokens the grammars of a step's rows allow, worked out in a thread of its own while the model computes.

A row whose masks are not there in time sits the step out: its last token is computed again in the next one, and nobody
waits for it. A matcher's state is a function of the output, so a row that starts anew (after a preemption, a fork, on
another replica) gets a fresh one, which is fed the output so far.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from serve_app.core.sampling_params import SamplingParams
from serve_app.core.step_plan import ScheduledRequest
from serve_app.errors import InvalidRequestError
from serve_app.grammars import Bits, Grammars, Matcher

_PATIENCE_S = 0.005
"""How long a step waits for its masks after the forward pass."""
_MAX_WORK_S = 2.0
"""Processor time that the grammar of one choice may take in one slot."""


@dataclass(slots=True, eq=False)
class Follower:
    """Where the output of one running choice stands in its grammar. Used by one thread at a time."""

    matcher: Matcher | None
    error: str | None = None
    """Why the choice cannot go on."""
    num_consumed: int = 0
    work_s: float = 0.0
    masks: "Future[list[Bits] | str] | None" = None
    """Of the places where the step samples: a mask for each, or why there is none."""

    def consume(self, token_ids: Sequence[int]) -> None:
        """Take in the output's next tokens."""
        self.num_consumed += len(token_ids)
        if self.matcher is not None and self.error is None and not self.matcher.consume(token_ids):
            self.error = f"the grammar does not allow the output: {self.matcher.error}"

    def allowed(self, drafts: Sequence[int]) -> list[Bits] | str:
        """The masks after the output, and after each of `drafts` behind it; or why there are none."""
        if self.matcher is None or self.error is not None:
            return self.error or "this engine knows no grammars"
        masks: list[Bits] = []
        for draft in (*drafts, None):
            mask = self.matcher.allowed()
            if mask is None or not mask.any():
                self.error = f"the grammar leaves no token to choose: {self.matcher.error}"
                return self.error
            masks.append(mask)
            # Behind a draft that is not allowed, or that ends the output, nothing is kept.
            if draft is None or not mask[draft] or draft in self.matcher.eos_token_ids:
                break
            if not self.matcher.consume([draft]):
                self.error = f"the grammar takes too much work: {self.matcher.error}"
                return self.error
        self.matcher.roll_back(len(masks) - 1)
        return masks + [masks[-1]] * (len(drafts) + 1 - len(masks))

    def forced(self) -> tuple[int, ...]:
        """Tokens that come next because the grammar leaves no choice about their text."""
        return () if self.matcher is None or self.error is not None else tuple(self.matcher.forced())


class Constrained(Protocol):
    """What is known here of a slot."""

    follower: Follower | None

    def output_from(self, start: int) -> list[int]:
        """Its output tokens from number `start` on."""


class GrammarMasks:
    """Makes followers for slots, and works out the masks of a step's rows."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._work_s = 0.0
        """Processor time so far; the thread's to write."""
        self._told_s = 0.0

    def follower(self, params: SamplingParams) -> Follower | None:
        """For a choice that takes a slot; None where it has no grammar."""
        if params.grammar is None:
            return None
        if self._grammars is None:
            return Follower(None)
        try:
            return Follower(self._grammars.matcher(params.grammar))
        except InvalidRequestError as error:
            return Follower(None, error.message)

    def begin(self, rows: Sequence[ScheduledRequest], slots: Sequence[Constrained]) -> None:
        """Before the forward pass. What a row that sat out began then is still right: its output has not grown, and
        it has no drafts."""
        for row, slot, follower in _constrained(rows, slots):
            if follower.masks is None:
                new = slot.output_from(follower.num_consumed)
                follower.masks = self._thread.submit(self._work_out, follower, new, row.draft_token_ids)

    def finish(
        self, rows: Sequence[ScheduledRequest], slots: Sequence[Constrained], masks: dict[int, Bits]
    ) -> dict[int, str | None]:
        """After the forward pass: writes down a mask for each place where a constrained row samples.

        Returns the rows that cannot sample, and why; None: their masks are not ready.
        """
        constrained = list(_constrained(rows, slots))
        if not constrained:
            return {}
        wait([follower.masks for *_, follower in constrained if follower.masks is not None], timeout=_PATIENCE_S)
        held: dict[int, str | None] = {}
        place = 0
        for i, row in enumerate(rows):
            found = self._take(slots[i].follower) if row.samples else []
            if isinstance(found, list):
                masks.update((place + j, mask) for j, mask in enumerate(found[: 1 + len(row.draft_token_ids)]))
            else:
                held[i] = found
            place += row.samples * (1 + len(row.draft_token_ids))
        return held

    def take_work_s(self) -> float:
        """Processor time of masks since the last call, in seconds."""
        worked = self._work_s
        since, self._told_s = worked - self._told_s, worked
        return since

    def _work_out(self, follower: Follower, new: Sequence[int], drafts: Sequence[int]) -> list[Bits] | str:
        """In the thread: the masks that a row needs."""
        began = time.thread_time()
        if new:
            follower.consume(new)
        masks = follower.allowed(drafts)
        spent = time.thread_time() - began
        self._work_s += spent
        follower.work_s += spent
        if follower.work_s > _MAX_WORK_S:
            follower.error = f"the grammar took more than {_MAX_WORK_S:g} s of processor time"
            return follower.error
        return masks

    @staticmethod
    def _take(follower: Follower | None) -> list[Bits] | str | None:
        if follower is None:
            return []
        future = follower.masks
        if future is None or not future.done():
            return None
        follower.masks = None
        return future.result()


def _constrained(
    rows: Iterable[ScheduledRequest], slots: Iterable[Constrained]
) -> Iterator[tuple[ScheduledRequest, Constrained, Follower]]:
    """Rows that sample by a grammar."""
    for row, slot in zip(rows, slots, strict=True):
        if row.samples and slot.follower is not None:
            yield row, slot, slot.follower
