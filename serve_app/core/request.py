"""A request between processes (`EngineRequest`), and in the scheduler (`Request`, one per choice).

`make_choices` converts one to the other. It refuses requests that can never run, naming the field
and the limit.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from serve_app.core.block_pool import Block
from serve_app.core.config import SchedulerConfig
from serve_app.core.prompt_lookup import PromptLookup
from serve_app.core.results import NO_RESULTS, FinishReason, Results, TokenDelta
from serve_app.core.sampling_params import SamplingParams
from serve_app.errors import ContextLengthError, InvalidRequestError, RequestError


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as the engine receives it: token ids in, token ids out.

    - prior_output_ids: per choice, the output ids from another replica (failover); empty for a new
      request.
    - finished_choices: indices of complete choices, whatever their last token; never all choices.
    - cache_salt separates the prefix caches of tenants.
    - priority: the lowest is served first.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    prior_output_ids: tuple[tuple[int, ...], ...] = ()
    finished_choices: tuple[int, ...] = ()
    cache_salt: str = ""
    priority: int = 0


class RequestStatus(Enum):
    """State of a choice. FORKING: waits until the first choice has computed their common prompt."""

    FORKING = auto()
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Request:
    """One choice of one request. Scheduling makes `num_computed_tokens` catch up with `num_tokens`.

    - order: (priority, arrival number, choice), unique; the lowest is served first and preempted
      last.
    - max_num_tokens: prompt and output together; the choice ends with LENGTH there.
    - num_prefill_tokens: tokens known when it took its slot. Computing those is prefill, later ones
      decode.
    - num_in_flight, num_awaited: tokens computed by the steps in flight, and tokens sampled by them
      (ids still unknown).
    """

    request_id: str
    choice: int
    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    max_num_tokens: int
    stop_token_ids: frozenset[int]
    cache_salt: str
    order: tuple[int, int, int]
    arrived_at: float
    leader: "Request | None" = None
    """The choice that computes the prompt for this one; None for that choice itself."""
    status: RequestStatus = RequestStatus.FORKING
    slot: int = -1
    blocks: list[Block] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    num_awaited: int = 0
    num_prefill_tokens: int = 0
    num_published_blocks: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached_tokens: int | None = None
    """Prompt tokens found computed at first admission. None before, and once reported."""
    was_admitted: bool = False
    missing_prompt_results: int = 0
    """Prompt logprobs still to be delivered.

    Always the last ones: a recomputed prompt must not repeat the others.
    """
    lookup: PromptLookup = field(default_factory=PromptLookup)
    forced: tuple[int, ...] = ()
    """Tokens that the grammar forces next, if known. They are drafted."""
    sat_out: bool = False
    """Whether the previous step could not sample it, because its grammar mask was not ready."""

    @property
    def arrival(self) -> int:
        """The request's number in order of arrival."""
        return self.order[1]

    @property
    def num_tokens(self) -> int:
        """Number of known tokens, prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of known output tokens, including an earlier replica's."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """Maximum number of tokens that may come from the prefix cache.

        At least one token must be computed to yield the next. Prompt tokens with missing results
        are predicted by the tokens before them, so these must be computed too. A mean needs all
        tokens.
        """
        if self.params.pooling == "mean":
            return 0
        if self.missing_prompt_results:
            return self.num_prompt_tokens - 1 - self.missing_prompt_results
        return self.num_tokens - 1

    @property
    def is_prefilling(self) -> bool:
        """Whether some tokens known at admission are not planned yet."""
        return self.num_computed_tokens + self.num_in_flight < self.num_prefill_tokens

    @property
    def can_decode(self) -> bool:
        """Whether prefill is planned completely and another token may follow those in flight."""
        return (
            self.num_computed_tokens + self.num_in_flight >= self.num_prefill_tokens
            and len(self.token_ids) + self.num_awaited < self.max_num_tokens
        )

    def finish_reason(self) -> FinishReason | None:
        """Return why the last token ends this choice, or None.

        Before `min_tokens`, stop tokens do not end it.
        """
        total = len(self.token_ids)
        if self.token_ids[-1] in self.stop_token_ids and total - self.num_prompt_tokens >= max(
            1, self.params.min_tokens
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if total >= self.max_num_tokens else None

    def draft(self, at_most: int, min_chance: float) -> tuple[int, ...]:
        """Return drafts of the tokens after the last one, for the step being planned.

        The last token may be in flight if the grammar forces the next ones. The final token allowed
        by the limit is never drafted, because the position before it yields it.
        """
        if self.sat_out:
            return ()
        ahead = max(0, self.num_awaited - 1)
        at_most = min(at_most, self.max_num_tokens - self.num_tokens - ahead - 1)
        if self.forced:
            return self.forced[ahead : ahead + max(0, at_most)]
        return self.lookup.propose(self.token_ids, at_most, min_chance) if at_most > 0 else ()

    def take_prompt_results(self, results: Results, start: int) -> Results:
        """Return a row's prompt results that were not delivered yet.

        `start`: the row's first token.
        """
        delivered = self.num_prompt_tokens - 1 - self.missing_prompt_results
        first = max(0, delivered - max(start, self.params.prompt_logprobs_from - 1))
        count = max(map(len, results.values())) - first
        if not self.missing_prompt_results or count <= 0:
            return NO_RESULTS
        self.missing_prompt_results -= count
        return {kind: entries[first:] for kind, entries in results.items()}

    def append(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append sampled tokens up to the end of the choice.

        Returns the appended tokens, and the reason if the choice ends.
        """
        for count, token_id in enumerate(token_ids, 1):
            self.token_ids.append(token_id)
            # Avoids a call per row in a large batch.
            may_end = token_id in self.stop_token_ids or len(self.token_ids) >= self.max_num_tokens
            if may_end and (reason := self.finish_reason()) is not None:
                return token_ids[:count], reason
        return token_ids, None

    def delta(
        self,
        token_ids: tuple[int, ...],
        finish_reason: FinishReason | None,
        results: Results = NO_RESULTS,
        prompt_results: Results = NO_RESULTS,
        error: RequestError | None = None,
    ) -> TokenDelta:
        """Return the delta for `token_ids`, already appended. `results` may cover more tokens."""
        num_cached_tokens, self.num_cached_tokens = self.num_cached_tokens, None
        return TokenDelta(
            self.request_id,
            self.choice,
            len(self.token_ids) - self.num_prompt_tokens - len(token_ids),
            token_ids,
            finish_reason,
            num_cached_tokens,
            error,
            {kind: entries[: len(token_ids)] for kind, entries in results.items()} if results else NO_RESULTS,
            prompt_results,
        )


def _check_ids(param: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    if token_ids and set(map(type, token_ids)) != {int}:
        raise InvalidRequestError(f"`{param}` must contain integers", param=param)
    for bad in (i for i in (min(token_ids, default=0), max(token_ids, default=0)) if not 0 <= i < vocab_size):
        raise InvalidRequestError(f"`{param}` contains token id {bad}; ids are 0 to {vocab_size - 1}", param=param)


def _length_limit(request: EngineRequest, config: SchedulerConfig) -> int:
    """Return the maximum of prompt and output tokens. Raises `ContextLengthError` if it cannot fit.

    The last output token is never computed, so the pool may be one token smaller than the request.
    """
    prompt, params = len(request.prompt_token_ids), request.params
    pool = (config.num_blocks - 1) * config.block_size + 1
    context = config.max_model_len
    if params.pooling is not None:
        if prompt > context:
            raise ContextLengthError(
                f"`prompt` has {prompt} tokens, but the model's context is {context}", param="prompt"
            )
        context += 1  # the one sampled token is dropped and needs no position
    for limit, name in ((context, "the model's context of"), (pool, "the KV pool, which holds")):
        if prompt >= limit:
            raise ContextLengthError(
                f"`prompt` has {prompt} tokens and leaves no room for output in {name} {limit} tokens", param="prompt"
            )
        if params.max_tokens is not None and prompt + params.max_tokens > limit:
            raise ContextLengthError(
                f"`prompt` ({prompt} tokens) plus `max_tokens` ({params.max_tokens}) exceeds {name} {limit} tokens",
                param="max_tokens",
            )
    limit = min(config.max_model_len, pool)
    if params.max_tokens is not None:
        return prompt + params.max_tokens
    if prompt + params.min_tokens > limit:
        raise ContextLengthError(
            f"`prompt` ({prompt} tokens) plus `min_tokens` ({params.min_tokens}) exceeds {limit} tokens",
            param="min_tokens",
        )
    return limit


def _check_prior_output(request: EngineRequest, limit: int, vocab_size: int) -> None:
    prior = request.prior_output_ids
    if prior and len(prior) != request.params.n:
        raise InvalidRequestError(
            f"`prior_output_ids` has {len(prior)} entries for {request.params.n} choices", param="prior_output_ids"
        )
    for output_ids in prior:
        _check_ids("prior_output_ids", output_ids, vocab_size)
        if len(request.prompt_token_ids) + len(output_ids) > limit:
            raise ContextLengthError(
                f"`prior_output_ids` has {len(output_ids)} tokens where at most "
                f"{limit - len(request.prompt_token_ids)} can be generated",
                param="prior_output_ids",
            )


def make_choices(request: EngineRequest, config: SchedulerConfig, arrival: int, now: float) -> list[Request]:
    """Validate `request` and return its choices in order.

    The first unfinished choice leads: it is WAITING and computes the prompt. The others are
    FORKING. Choices whose prior output is complete, and `finished_choices`, are FINISHED. Raises
    InvalidRequestError or ContextLengthError.
    """
    params, prompt = request.params, request.prompt_token_ids
    # Both are used inside a step, where a wrong type would affect all requests.
    if type(request.priority) is not int:
        raise InvalidRequestError("`priority` must be an integer", param="priority")
    if not isinstance(request.cache_salt, str):
        raise InvalidRequestError("`cache_salt` must be a string", param="cache_salt")
    if not prompt:
        raise InvalidRequestError("`prompt` must contain at least one token", param="prompt")
    _check_ids("prompt", prompt, config.vocab_size)
    params.check_vocab(config.vocab_size)
    limit = _length_limit(request, config)
    _check_prior_output(request, limit, config.vocab_size)
    stop = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else config.eos_token_ids)
    choices: list[Request] = []
    leader: Request | None = None
    for i in range(params.n):
        choice = Request(
            request_id=request.request_id,
            choice=i,
            params=params,
            token_ids=[*prompt, *(request.prior_output_ids[i] if request.prior_output_ids else ())],
            num_prompt_tokens=len(prompt),
            max_num_tokens=limit,
            stop_token_ids=stop,
            cache_salt=request.cache_salt,
            order=(request.priority if config.policy == "priority" else 0, arrival, i),
            arrived_at=now,
            leader=leader,
        )
        # Choice 0 delivers the prompt's results. If an earlier replica delivered output, the
        # prompt's logprobs came before it.
        if i == 0 and params.wants_prompt_results and choice.num_output_tokens == 0:
            choice.missing_prompt_results = max(0, len(prompt) - params.prompt_logprobs_from)
        if i in request.finished_choices or choice.finish_reason() is not None:
            choice.status = RequestStatus.FINISHED
        elif leader is None:
            leader, choice.status = choice, RequestStatus.WAITING
        choices.append(choice)
    if leader is None:
        raise InvalidRequestError(
            "`prior_output_ids` is complete: no choice is left to generate", param="prior_output_ids"
        )
    return choices
