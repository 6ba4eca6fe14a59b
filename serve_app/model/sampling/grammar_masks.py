"""Computes the grammar masks of a step's rows in a separate thread while the model runs.

If a row's masks are not ready in time, the row sits out the step: its last token is computed again
in the next step, and other rows do not wait. A matcher's state is a function of the output. So a
row that starts again (after a preemption, a fork, or on another replica) gets a fresh matcher,
which consumes the output so far.
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

# Upper limits of eight logits, by the byte of a token set that has their bits. [256, 8].
_CEILINGS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf
).astype(np.float32)
_PATIENCE_S = 0.005
"""Seconds that a step waits for its masks after its forward pass is launched and all previous
tokens are known.
"""
_MAX_WORK_S = 2.0
"""Maximum CPU seconds that the grammar of one choice may use in one slot."""


def mask_out(row: Tensor, allowed: TokenSet | None) -> None:
    """Apply a grammar mask, in place on one row of logits."""
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
    """Grammar state of one running choice. Only one thread may use it at a time."""

    matcher: Matcher | None
    error: RequestError | None = None
    """Set if the choice cannot continue."""
    num_consumed: int = 0
    work_s: float = 0.0
    masks: list[TokenSet] | RequestError | None = None
    """One mask per sampling position of the row, or the error. None: not computed yet."""
    is_begun: bool = False
    """The thread has been asked for masks that no step has taken yet."""

    def consume(self, token_ids: Sequence[int]) -> None:
        """Consume the output's next tokens."""
        self.num_consumed += len(token_ids)
        if self.matcher is not None and self.error is None and not self.matcher.consume(token_ids):
            self.error = self.matcher.failure()

    def allowed(self, drafts: Sequence[int]) -> list[TokenSet] | RequestError:
        """Return the masks after the output and after each of `drafts`, or the error."""
        if self.matcher is None or self.error is not None:
            return self.error or EngineError("this engine supports no grammars")
        masks: list[TokenSet] = []
        for draft in (*drafts, None):
            mask = self.matcher.allowed()
            if not mask:
                self.error = self.matcher.failure()
                return self.error
            masks.append(mask)
            # Tokens after a disallowed or final draft are not used.
            if draft is None or draft not in mask or draft in self.matcher.eos_token_ids:
                break
            if not self.matcher.consume([draft]):
                self.error = self.matcher.failure()
                return self.error
        self.matcher.roll_back(len(masks) - 1)
        return masks + [masks[-1]] * (len(drafts) + 1 - len(masks))

    def take(self) -> list[TokenSet] | RequestError | None:
        """Return `masks` and reset them for the next step."""
        masks = self.masks
        if masks is not None:
            self.masks, self.is_begun = None, False
        return masks

    def forced(self) -> tuple[int, ...]:
        """Return the next tokens if the grammar fixes their text."""
        return () if self.matcher is None or self.error is not None else tuple(self.matcher.forced())


@dataclass(frozen=True, slots=True)
class Awaited:
    """A row that samples with a grammar.

    index: its index in the step. place: index of its first sampling position in the step; one
    position follows the output and one follows each of `drafts`. waits: the output's last token is
    in flight.
    """

    index: int
    place: int
    follower: Follower
    slot: "Constrained"
    drafts: Sequence[int]
    waits: bool

    @property
    def num_places(self) -> int:
        """Number of positions where the row samples."""
        return 1 + len(self.drafts)


class Constrained(Protocol):
    """The part of a slot that this module uses."""

    follower: Follower | None

    def output_from(self, start: int) -> list[int]:
        """Return the output tokens from index `start`."""


class GrammarMasks:
    """Creates followers for slots, and computes the masks of a step's rows."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._newest: Future[None] | None = None
        """Completes when all work submitted to the thread is done."""
        self._work_s = 0.0
        """CPU seconds so far. Only the thread writes it."""
        self._told_s = 0.0

    def follower(self, params: SamplingParams) -> Follower | None:
        """Return the follower of a choice that gets a slot. None if it has no grammar."""
        if params.grammar is None:
            return None
        if self._grammars is None:
            return Follower(None)
        try:
            return Follower(self._grammars.matcher(params.grammar, params.thinking_budget))
        except InvalidRequestError as error:
            return Follower(None, error)

    def begin(self, rows: Sequence[ScheduledRequest], slots: Sequence[Constrained]) -> list[Awaited]:
        """Start the step's masks before the forward pass, and return the constrained rows. Rows
        that wait for a token start in `go_on`.
        """
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
        """Start rows that waited for the previous step's tokens, which must be known now."""
        self._start(row for row in awaited if row.waits)

    def _start(self, awaited: Iterable[Awaited]) -> None:
        """Start computing masks. Work started for a row that sat out stays valid: its output has
        not grown, and it has no drafts.
        """
        work = []
        for row in awaited:
            follower = row.follower
            if not follower.is_begun:
                follower.is_begun = True
                work.append((follower, row.slot.output_from(follower.num_consumed), row.drafts))
        if work:
            self._newest = self._thread.submit(self._work_out_all, work)

    def finish(self, awaited: Sequence[Awaited], masks: dict[int, TokenSet]) -> dict[int, RequestError | None]:
        """Store a mask for each sampling position of the constrained rows. Called after the forward
        pass.

        Returns the rows that cannot sample, with the error, or None if their masks are not ready.
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
        """Return the CPU seconds spent on masks since the last call."""
        worked = self._work_s
        since, self._told_s = worked - self._told_s, worked
        return since

    def _work_out_all(self, work: Sequence[tuple[Follower, Sequence[int], Sequence[int]]]) -> None:
        """Compute the masks of a step, in the thread. A single task, because submitting a task per
        row would cost as much as the row's work.
        """
        for follower, new, drafts in work:
            try:
                follower.masks = self._work_out(follower, new, drafts)
            except BaseException:  # a panic of a Rust library is not an Exception
                logger.exception("a grammar failed")
                follower.masks = EngineError("the grammar failed on this request")

    def _work_out(self, follower: Follower, new: Sequence[int], drafts: Sequence[int]) -> list[TokenSet] | RequestError:
        """Compute the masks of one row."""
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
