"""Which tokens the grammars of a step's rows allow, worked out in a thread of its own while the model computes.

A row whose masks are not there in time sits the step out: its last token is computed again in the next one, and nobody
waits for it. A matcher's state is a function of the output, so a row that starts anew (after a preemption, a fork, on
another replica) gets a fresh one, which is fed the output so far.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from serve_app.core.sampling_params import SamplingParams
from serve_app.core.step_plan import ScheduledRequest
from serve_app.errors import EngineError, InvalidRequestError, RequestError
from serve_app.grammars import Grammars, Matcher, Refusal
from serve_app.grammars.token_set import TokenSet

logger = logging.getLogger(__name__)

# What eight logits may be at most, by the byte of a token set that tells which of them are allowed. [256, 8].
_CEILINGS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf
).astype(np.float32)
_PATIENCE_S = 0.005
"""How long a step waits for its masks once its forward pass is launched and all tokens before it are known."""
_MAX_WORK_S = 2.0
"""Processor time that the grammar of one choice may take in one slot."""


def mask_out(row: Tensor, allowed: TokenSet | None) -> None:
    """Leave only what a grammar allows, in place on one row of logits."""
    if allowed is None:
        return
    if row.device.type == "cpu":
        values = row.numpy()
        packed = np.frombuffer(allowed.packed, dtype=np.uint8)
        np.minimum(values, _CEILINGS.take(packed, axis=0).reshape(-1)[: allowed.width], out=values)
    else:
        row.masked_fill_(torch.from_numpy(~allowed.bits()).to(row.device), -torch.inf)


@dataclass(slots=True, eq=False)
class Follower:
    """Where the output of one running choice stands in its grammar. Used by one thread at a time."""

    matcher: Matcher | None
    error: RequestError | None = None
    """Why the choice cannot go on."""
    num_consumed: int = 0
    work_s: float = 0.0
    masks: list[TokenSet] | RequestError | None = None
    """Of the places where the step samples: a mask for each, or why there is none. None: not worked out yet."""
    is_begun: bool = False
    """The thread has been told to work out masks that no step has taken yet."""

    def consume(self, token_ids: Sequence[int]) -> None:
        """Take in the output's next tokens."""
        self.num_consumed += len(token_ids)
        if self.matcher is not None and self.error is None and not self.matcher.consume(token_ids):
            self.error = self.matcher.failure()

    def allowed(self, drafts: Sequence[int]) -> list[TokenSet] | RequestError:
        """The masks after the output, and after each of `drafts` behind it; or why there are none."""
        if self.matcher is None or self.error is not None:
            return self.error or EngineError("this engine knows no grammars")
        masks: list[TokenSet] = []
        for draft in (*drafts, None):
            mask = self.matcher.allowed()
            if not mask:
                self.error = self.matcher.failure()
                return self.error
            masks.append(mask)
            # Behind a draft that is not allowed, or that ends the output, nothing is kept.
            if draft is None or draft not in mask or draft in self.matcher.eos_token_ids:
                break
            if not self.matcher.consume([draft]):
                self.error = self.matcher.failure()
                return self.error
        self.matcher.roll_back(len(masks) - 1)
        return masks + [masks[-1]] * (len(drafts) + 1 - len(masks))

    def take(self) -> list[TokenSet] | RequestError | None:
        """`masks`, of which the next step will have others."""
        masks = self.masks
        if masks is not None:
            self.masks, self.is_begun = None, False
        return masks

    def forced(self) -> tuple[int, ...]:
        """Tokens that come next because the grammar leaves no choice about their text."""
        return () if self.matcher is None or self.error is not None else tuple(self.matcher.forced())


@dataclass(frozen=True, slots=True)
class Awaited:
    """A row that samples by a grammar: its number in the step, and its places among those where the step samples, after
    the output and after each of `drafts`. waits: the output's last token is in flight."""

    index: int
    place: int
    follower: Follower
    slot: "Constrained"
    drafts: Sequence[int]
    waits: bool

    @property
    def num_places(self) -> int:
        """Where the row samples."""
        return 1 + len(self.drafts)


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
        self._newest: Future[None] | None = None
        """Done when all that the thread was given is done."""
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
            return Follower(None, error)

    def begin(self, rows: Sequence[ScheduledRequest], slots: Sequence[Constrained]) -> list[Awaited]:
        """Before the forward pass: the step's constrained rows. Work on those that wait for a token begins later."""
        awaited: list[Awaited] = []
        place = 0
        for i, (row, slot) in enumerate(zip(rows, slots, strict=True)):
            if not row.samples:
                continue
            if slot.follower is not None:
                awaited.append(Awaited(i, place, slot.follower, slot, row.draft_token_ids, row.waits))
            place += 1 + len(row.draft_token_ids)
        self._start(row for row in awaited if not row.waits)
        return awaited

    def go_on(self, awaited: Sequence[Awaited]) -> None:
        """Begin what waited for tokens of the step before, which are known now."""
        self._start(row for row in awaited if row.waits)

    def _start(self, awaited: Iterable[Awaited]) -> None:
        """What a row that sat out began then is still right: its output has not grown, and it has no drafts."""
        work = []
        for row in awaited:
            follower = row.follower
            if not follower.is_begun:
                follower.is_begun = True
                work.append((follower, row.slot.output_from(follower.num_consumed), row.drafts))
        if work:
            self._newest = self._thread.submit(self._work_out_all, work)

    def finish(self, awaited: Sequence[Awaited], masks: dict[int, TokenSet]) -> dict[int, RequestError | None]:
        """After the forward pass: writes down a mask for each place where a constrained row samples.

        Returns the rows that cannot sample, and why; None: their masks are not ready.
        """
        if not awaited:
            return {}
        if self._newest is not None:
            with suppress(TimeoutError):
                self._newest.result(_PATIENCE_S)
        held: dict[int, RequestError | None] = {}
        for row in awaited:
            found = row.follower.take()
            if isinstance(found, list):
                masks.update(enumerate(found[: row.num_places], row.place))
            else:
                held[row.index] = found
        return held

    def take_work_s(self) -> float:
        """Processor time of masks since the last call, in seconds."""
        worked = self._work_s
        since, self._told_s = worked - self._told_s, worked
        return since

    def _work_out_all(self, work: Sequence[tuple[Follower, Sequence[int], Sequence[int]]]) -> None:
        """In the thread: the masks of a step. One task, because handing over each row's would cost as much as it."""
        for follower, new, drafts in work:
            try:
                follower.masks = self._work_out(follower, new, drafts)
            except BaseException:  # a panic of a Rust library is no Exception
                logger.exception("a grammar failed")
                follower.masks = EngineError("the grammar failed on this request")

    def _work_out(self, follower: Follower, new: Sequence[int], drafts: Sequence[int]) -> list[TokenSet] | RequestError:
        """The masks that a row needs."""
        began = time.thread_time()
        if new:
            follower.consume(new)
        masks = follower.allowed(drafts)
        spent = time.thread_time() - began
        self._work_s += spent
        follower.work_s += spent
        if follower.work_s > _MAX_WORK_S:
            reason = f"the grammar took more than {_MAX_WORK_S:g} s of processor time"
            follower.error = InvalidRequestError(reason, code=Refusal.TOO_LARGE)
            return follower.error
        return masks
