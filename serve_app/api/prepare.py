"""Builds engine requests from checked bodies.

Checks model name, prompt length and output length; sets sampling parameters and seed.
"""

import asyncio
import json
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from serve_app.api.bodies.messages import USUAL_ROLES, Message
from serve_app.api.bodies.schemas import GenerationBody
from serve_app.api.bodies.tools import Tool
from serve_app.api.door.limits import ApiLimits
from serve_app.api.service import ModelCard
from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams, ThinkingBudget
from serve_app.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError, OverloadedError
from serve_app.grammars import check_has_end
from serve_app.tenants.tenant import Tenant
from serve_app.text.chat_template import Ending
from serve_app.text.stream import StopConfig
from serve_app.text.tokenizer import Tokenizer

_LONG_TEXT = 8192
"""Texts of at least this many characters (about 2 ms of tokenizing) are tokenized in a thread."""
_BYTES_PER_CHARACTER = 16
"""Bytes of a body that are parsed in the time of tokenizing one character; 4 MiB take 50 ms."""
_MESSAGE = 64
"""Cost of one message in the chat template besides its text, in characters of tokenizing."""
_TEXT = 128
"""Cost of one text besides its length, in characters of tokenizing."""
_BATCH = 64
"""Texts per batch of tokenizing, so that other requests' texts can run in between."""
_SLICE = 65_536
"""Characters per slice while checking whether a text is far too long."""
_MAX_WAITING = 128
"""Texts that may wait for the worker thread. Most take milliseconds, the worst a fraction of a
second."""
_MOST_PAUSE_S = 0.1
"""Maximum pause between parsing two large bodies, in seconds."""
_MAX_OTHER_ROLES = 4
"""Roles per request besides OpenAI's. The template is rendered twice to check each."""
_workers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")

T = TypeVar("T")


class _Waiting:
    count = 0


class _Parsing:
    """Parses large bodies one after another, with pauses.

    A parser holds the GIL for tens of milliseconds, while streaming needs it several times per
    token. So each parse is followed by a pause of the same length.
    """

    begins_at = 0.0

    @classmethod
    def run(cls, parse: Callable[[bytes], T], raw: bytes) -> T:
        time.sleep(max(0.0, cls.begins_at - time.monotonic()))
        begun = time.monotonic()
        try:
            return parse(raw)
        finally:
            ended = time.monotonic()
            cls.begins_at = ended + min(ended - begun, _MOST_PAUSE_S)


async def off_loop(work: Callable[[], T], size: int) -> T:
    """Run text work, in a thread if it is large. `size` is in characters or tokens.

    Raises `OverloadedError` if too many texts wait.
    """
    if size < _LONG_TEXT:
        return work()
    if _Waiting.count >= _MAX_WAITING:
        raise OverloadedError("too many long texts at the same time; retry later", code="texts_full", retry_after_s=1.0)
    _Waiting.count += 1
    try:
        return await asyncio.get_running_loop().run_in_executor(_workers, work)
    finally:
        _Waiting.count -= 1


async def parsed(parse: Callable[[bytes], T], raw: bytes) -> T:
    """Parse a body, in a thread if it is large."""
    size = len(raw) // _BYTES_PER_CHARACTER
    return parse(raw) if size < _LONG_TEXT else await off_loop(partial(_Parsing.run, parse, raw), size)


async def encode_prompt(
    tokenizer: Tokenizer,
    text: str,
    card: ModelCard,
    *,
    add_special_tokens: bool = True,
    field: str = "prompt",
    scope: str | None = None,
) -> list[int]:
    """Return the token ids of a text prompt.

    field: the text's name in the body. scope: as for `Tokenizer.encode`.
    Raises `ContextLengthError`. A text far beyond the context is refused after tokenizing only a
    part of it.
    """
    await _check_size(tokenizer, text, card, field)
    work = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens, scope=scope)
    return await off_loop(work, len(text))


async def encode_prompts(
    tokenizer: Tokenizer, texts: Mapping[str, str], card: ModelCard, *, add_special_tokens: bool = True
) -> list[list[int]]:
    """Return the token ids of several texts, which are given by field name.

    Many short texts are also tokenized in a thread. Raises as `encode_prompt` does.
    """
    for field, text in texts.items():
        await _check_size(tokenizer, text, card, field)
    found: list[list[int]] = []
    everything = [*texts.values()]
    for start in range(0, len(texts), _BATCH):
        batch = everything[start : start + _BATCH]
        work = partial(_encode_all, tokenizer, batch, add_special_tokens)
        found += await off_loop(work, sum(map(len, batch)) + _TEXT * len(batch))
    return found


def _encode_all(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]


async def encode_messages(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    card: ModelCard,
    tools: Sequence[Tool] = (),
    variables: Mapping[str, Any] | None = None,
    ending: Ending = Ending.ANSWER,
    scope: str | None = None,
) -> list[int]:
    """Return the token ids of a chat.

    Raises as `encode_prompt` and `Tokenizer.apply_chat_template` do.
    """
    _check_roles(tokenizer, messages)
    plain = [message.for_template() for message in messages]
    given = [tool.for_template() for tool in tools]
    # Tools and calls are in the prompt as JSON or a similar form.
    others = [_as_json(given)] if given else []
    others += [_as_json(message["tool_calls"]) for message in plain if "tool_calls" in message]
    text = "".join([message["content"] for message in plain] + others)
    await _check_size(tokenizer, text, card, "messages")
    work = partial(tokenizer.apply_chat_template, plain, given, variables, ending, scope)
    return await off_loop(work, len(text) + _MESSAGE * len(plain))


def _as_json(data: Any) -> str:
    """JSON as templates write it, without escapes.

    Empty if it cannot be written; the template then refuses it.
    """
    try:
        return json.dumps(data, ensure_ascii=False).encode(errors="replace").decode()
    except (ValueError, RecursionError):
        return ""


def _check_roles(tokenizer: Tokenizer, messages: Sequence[Message]) -> None:
    first = {message.role: i for i, message in reversed([*enumerate(messages)]) if message.role not in USUAL_ROLES}
    if len(first) > _MAX_OTHER_ROLES:
        raise InvalidRequestError(
            f"`messages` may use at most {_MAX_OTHER_ROLES} roles besides OpenAI's", param="messages"
        )
    for role, i in first.items():
        if not tokenizer.takes_role(role):
            raise InvalidRequestError(
                f"`messages[{i}].role`: this model's chat template has no role {role!r}", param=f"messages[{i}].role"
            )


async def decode_ids(tokenizer: Tokenizer, token_ids: list[int], card: ModelCard) -> str:
    """Return the text of at most `max_model_len` ids. Raises `InvalidRequestError`."""
    if len(token_ids) > card.max_model_len:
        raise InvalidRequestError(
            f"`tokens` contains {len(token_ids)} ids, but this model's context is {card.max_model_len}", param="tokens"
        )
    if max(token_ids, default=0) >= card.vocab_size:
        raise InvalidRequestError(f"`tokens` must contain ids below {card.vocab_size}", param="tokens")
    return await off_loop(partial(tokenizer.decode, token_ids), len(token_ids))


async def _check_size(tokenizer: Tokenizer, text: str, card: ModelCard, field: str) -> None:
    """Refuse a text that is far too long, at little cost.

    It is refused by a lower bound on its tokens, or once its first slices have twice the context's
    tokens. Twice, because slices have a few more tokens than the whole text.
    """
    least = tokenizer.min_tokens(text)
    size = max(_LONG_TEXT, min(_SLICE, 8 * card.max_model_len))
    if least < card.max_model_len and len(text) > size:
        found = 0
        for start in range(0, len(text), size):
            found += await off_loop(partial(_count, tokenizer, text[start : start + size]), size)
            if found >= 2 * card.max_model_len:
                least = found // 2
                break
    if least >= card.max_model_len:
        raise ContextLengthError(
            f"`{field}` has at least {least} tokens, but this model's context is {card.max_model_len}", param=field
        )


def _count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def check_model(name: str | None, card: ModelCard) -> None:
    """Raise `ModelNotFoundError` if `name` is given and is not the served model."""
    if name is not None and not card.any_name and name not in (card.name, *card.aliases):
        raise ModelNotFoundError(
            f"the model {name[:100]!r} does not exist; GET /v1/models lists what is served", param="model"
        )


def check_tenant(tenant: Tenant, model: str) -> None:
    """Raise `ModelNotFoundError` if `tenant` may not use `model`."""
    if not tenant.may_use(model):
        raise ModelNotFoundError(f"the model {model!r} is not allowed for this API key", param="model")


def check_sequences(num_prompts: int, body: GenerationBody, limits: ApiLimits) -> None:
    """Check the limits on prompts times choices, and on prompts times answers with odds."""
    SamplingParams(n=1 if body.n is None else body.n)
    n = body.num_choices
    if num_prompts * n > limits.max_sequences:
        raise InvalidRequestError(
            f"`prompt` contains {num_prompts} prompts with `n` {n}: at most {limits.max_sequences} answers per request",
            param="prompt" if num_prompts > 1 else "n",
        )
    if num_prompts * len(body.answers_with_odds) > limits.max_sequences:
        raise InvalidRequestError(
            f"`structured_outputs.choice`: answers with `odds` times prompts must be at most {limits.max_sequences}, "
            f"got {len(body.answers_with_odds)} answers and {num_prompts} prompts",
            param="structured_outputs.choice",
        )


def stop_config(body: GenerationBody) -> StopConfig:
    """Return the stop conditions that the text layer checks."""
    return StopConfig(
        body.stop or (), bool(body.include_stop_str_in_output), body.min_tokens or 0, nothing=body.scores_only
    )


def truncated(token_ids: list[int], body: GenerationBody, card: ModelCard) -> list[int]:
    """Keep the last `truncate_prompt_tokens` tokens; -1 leaves room for `max_tokens`."""
    most = body.truncate_prompt_tokens
    if most is None:
        return token_ids
    if most == -1:
        most = max(1, card.max_model_len - max(1, body.max_tokens or 1))
    return token_ids[-most:]


def bad_words(body: GenerationBody, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each bad word.

    A word is encoded alone and after a space, as in vLLM. Both are returned if they differ in the
    first token but not in length.
    """
    found = []
    for word in body.bad_words or ():
        alone, inside = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
        )
        found += [alone] if inside[:1] == alone[:1] or len(inside) != len(alone) else [alone, inside]
    return tuple(found)


def check_prompt_logprobs(field: str, num_tokens: int, top: int, limits: ApiLimits) -> None:
    """Check the limit on prompt log-probabilities: `num_tokens` tokens with `top` alternatives
    each."""
    if num_tokens * (top + 1) > limits.max_prompt_logprobs:
        raise InvalidRequestError(
            f"`{field}` {top} over {num_tokens} tokens of prompts: at most {limits.max_prompt_logprobs} "
            "log-probabilities of prompts per request",
            param=field,
        )


def engine_request(
    body: GenerationBody,
    token_ids: list[int],
    card: ModelCard,
    *,
    prompt_field: str,
    max_tokens: tuple[str, int | None],
    default_max_tokens: int | None = None,
    logprobs: int | None = None,
    max_logprobs: int,
    prompt_logprobs: int | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: str | None = None,
    thinking_budget: ThinkingBudget | None = None,
    cache_salt: str,
) -> EngineRequest:
    """Return the engine request for one prompt.

    max_tokens: (field name, requested value). The value -1 means the rest of the context, as in
    llama.cpp and LM Studio. default_max_tokens: None is the rest of the context.
    max_logprobs: the limit on log-probabilities of all choices together. It shortens outputs
    without a requested length.
    Raises `InvalidRequestError` naming the field and its limit.
    """
    limit = _output_limit(
        body,
        token_ids,
        card,
        prompt_field=prompt_field,
        max_tokens=max_tokens,
        default=default_max_tokens,
        logprobs=logprobs,
        max_logprobs=max_logprobs,
    )
    if grammar is not None:
        check_has_end(card.end_ids)
    params = SamplingParams(
        **{**body.sampling_fields(), "n": body.num_choices},
        max_tokens=limit,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        bad_words=bad_words,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        thinking_budget=thinking_budget,
    )
    params.check_vocab(card.vocab_size)
    # A new id: a client's own id could equal that of another client's request.
    return EngineRequest(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=tuple(token_ids),
        params=params,
        cache_salt=cache_salt,
        priority=body.priority or 0,
    )


def _output_limit(
    body: GenerationBody,
    token_ids: list[int],
    card: ModelCard,
    *,
    prompt_field: str,
    max_tokens: tuple[str, int | None],
    default: int | None,
    logprobs: int | None,
    max_logprobs: int,
) -> int:
    """Return the maximum number of tokens per choice; see `engine_request`."""
    room = _room(token_ids, card, prompt_field)
    name, asked = max_tokens
    if asked == -1:
        asked, default = None, None
    if asked is not None and asked < 1:
        raise InvalidRequestError(f"`{name}` must be at least 1, got {asked}", param=name)
    if asked is not None and asked > room:
        raise ContextLengthError(
            f"`{name}` is {asked}, but this model's context of {card.max_model_len} tokens leaves {room} "
            f"after the {len(token_ids)} tokens of `{prompt_field}`",
            param=name,
        )
    limit = asked if asked is not None else min(room if default is None else default, room)
    if logprobs is not None:
        most = max_logprobs // ((logprobs + 1) * body.num_choices)
        if asked is not None and asked > most:
            raise InvalidRequestError(
                f"`{name}` {asked} with `n` {body.num_choices} and {logprobs} alternatives per token: at most "
                f"{max_logprobs} log-probabilities per prompt, which leaves `{name}` {most}",
                param=name,
            )
        limit = min(limit, most)
    return limit


def _room(token_ids: list[int], card: ModelCard, field: str) -> int:
    """Return the number of tokens left for the answer, at least 1.

    Raises `InvalidRequestError` and `ContextLengthError`.
    """
    if not token_ids:
        raise InvalidRequestError(f"`{field}` contains no tokens", param=field)
    room = card.max_model_len - len(token_ids)
    if room < 1:
        raise ContextLengthError(
            f"`{field}` has {len(token_ids)} tokens, but this model's context holds {card.max_model_len}, "
            "at least one of them for the answer",
            param=field,
        )
    check_ids(token_ids, card, field)
    return room


def check_ids(token_ids: Sequence[int], card: ModelCard, field: str) -> None:
    """Raise `InvalidRequestError` for ids beyond the model's logits.

    A text can also have such ids, if it contains an added token of the tokenizer.
    """
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < card.vocab_size:
            raise InvalidRequestError(
                f"`{field}` must contain token ids from 0 to {card.vocab_size - 1}, got {token_id}", param=field
            )


def answer_head(prefix: str, kind: str, card: ModelCard) -> dict[str, Any]:
    """Return the first fields of every answer and chunk."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": card.name,
        "system_fingerprint": card.fingerprint,
    }
