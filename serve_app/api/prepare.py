"""From a checked body to engine requests: model name, prompt length, output length, sampling parameters, seed."""

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
from serve_app.core.sampling_params import SamplingParams
from serve_app.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError, OverloadedError
from serve_app.grammars import check_has_end
from serve_app.tenants.tenant import Tenant
from serve_app.text.chat_template import Ending
from serve_app.text.stream import StopConfig
from serve_app.text.tokenizer import Tokenizer

_LONG_TEXT = 8192
"""Characters (about 2 ms of tokenizing) from which the work leaves the event loop."""
_BYTES_PER_CHARACTER = 16
"""So many bytes of a body are parsed in the time that one character is tokenized in; 4 MiB take 50 ms."""
_MESSAGE = 64
"""The time that the chat template takes for one message, however empty, in characters of text."""
_TEXT = 128
"""The same for a text, however short."""
_BATCH = 64
"""Texts that are tokenized at a time: others' need not wait for all of a request's."""
_SLICE = 65_536
"""Characters that are tokenized at a time while it is open whether a text has far too many."""
_MAX_WAITING = 128
"""Texts that may wait for a worker; a worker takes milliseconds for most, and a fraction of a second for the worst."""
_MOST_PAUSE_S = 0.1
"""Between two large bodies that are parsed."""
_MAX_OTHER_ROLES = 4
"""Of one request; for each, the template is rendered twice to find out whether it takes it."""
_workers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")

T = TypeVar("T")


class _Waiting:
    count = 0


class _Parsing:
    """Large bodies, one after the other. A parser holds the interpreter for tens of milliseconds at a time, and whoever
    passes a token on needs it several times: after each body it is theirs for as long."""

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
    """Run text work of this size (characters or tokens): here if it is small, else beside the event loop.

    Raises `OverloadedError` when too much waits already.
    """
    if size < _LONG_TEXT:
        return work()
    if _Waiting.count >= _MAX_WAITING:
        raise OverloadedError("too many long texts at one time; retry later", code="texts_full", retry_after_s=1.0)
    _Waiting.count += 1
    try:
        return await asyncio.get_running_loop().run_in_executor(_workers, work)
    finally:
        _Waiting.count -= 1


async def parsed(parse: Callable[[bytes], T], raw: bytes) -> T:
    """What `parse` makes of a body; of a large one, beside the event loop."""
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
    """Ids of a text prompt. Raises `ContextLengthError` without tokenizing all of what is far beyond the context.

    field: the text's name in the body. scope: as `Tokenizer.encode`.
    """
    await _check_size(tokenizer, text, card, field)
    work = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens, scope=scope)
    return await off_loop(work, len(text))


async def encode_prompts(
    tokenizer: Tokenizer, texts: Mapping[str, str], card: ModelCard, *, add_special_tokens: bool = True
) -> list[list[int]]:
    """Ids of several texts, by the fields in which they stand; errors as `encode_prompt`. Many short ones leave the
    event loop, too."""
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
    """Ids of a chat; errors as `encode_prompt` and `Tokenizer.apply_chat_template`."""
    _check_roles(tokenizer, messages)
    plain = [message.for_template() for message in messages]
    given = [tool.for_template() for tool in tools]
    # What is not content stands in the prompt as JSON or nearly so.
    others = [_as_json(given)] if given else []
    others += [_as_json(message["tool_calls"]) for message in plain if "tool_calls" in message]
    text = "".join([message["content"] for message in plain] + others)
    await _check_size(tokenizer, text, card, "messages")
    work = partial(tokenizer.apply_chat_template, plain, given, variables, ending, scope)
    return await off_loop(work, len(text) + _MESSAGE * len(plain))


def _as_json(data: Any) -> str:
    """As templates write it, without escapes; empty for what no template can write, which it refuses itself."""
    try:
        return json.dumps(data, ensure_ascii=False).encode(errors="replace").decode()
    except (ValueError, RecursionError):
        return ""


def _check_roles(tokenizer: Tokenizer, messages: Sequence[Message]) -> None:
    first = {message.role: i for i, message in reversed([*enumerate(messages)]) if message.role not in USUAL_ROLES}
    if len(first) > _MAX_OTHER_ROLES:
        raise InvalidRequestError(f"`messages` may hold {_MAX_OTHER_ROLES} roles beside the usual", param="messages")
    for role, i in first.items():
        if not tokenizer.takes_role(role):
            raise InvalidRequestError(
                f"`messages[{i}].role`: this model's chat template knows no role {role!r}", param=f"messages[{i}].role"
            )


async def decode_ids(tokenizer: Tokenizer, token_ids: list[int], card: ModelCard) -> str:
    """Text of as many ids as the context holds. Raises `InvalidRequestError`."""
    if len(token_ids) > card.max_model_len:
        raise InvalidRequestError(
            f"`tokens` holds {len(token_ids)} ids, but this model's context holds {card.max_model_len}", param="tokens"
        )
    if max(token_ids, default=0) >= card.vocab_size:
        raise InvalidRequestError(f"`tokens` must hold ids below {card.vocab_size}", param="tokens")
    return await off_loop(partial(tokenizer.decode, token_ids), len(token_ids))


async def _check_size(tokenizer: Tokenizer, text: str, card: ModelCard, field: str) -> None:
    """Refuse what is far too long for little work: by its bytes, or once its first slices make twice the context.

    Twice, because a text cut into slices makes a few tokens more than in one piece.
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
            f"`{field}` has at least {least} tokens, but this model's context holds {card.max_model_len}", param=field
        )


def _count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def check_model(name: str | None, card: ModelCard) -> None:
    """Raise `ModelNotFoundError` unless `name` is the served model (or not given)."""
    if name is not None and name != card.name:
        raise ModelNotFoundError(
            f"the model {name[:100]!r} does not exist; GET /v1/models lists what is served", param="model"
        )


def check_tenant(tenant: Tenant, model: str) -> None:
    """Raise `ModelNotFoundError` if the served `model` is not for `tenant`."""
    if not tenant.may_use(model):
        raise ModelNotFoundError(f"the model {model!r} is not open to this API key", param="model")


def check_sequences(num_prompts: int, body: GenerationBody, limits: ApiLimits) -> None:
    """Bound prompts times choices, and times answers whose odds are told, before anything is computed for them."""
    SamplingParams(n=1 if body.n is None else body.n)
    n = body.num_choices
    if num_prompts * n > limits.max_sequences:
        raise InvalidRequestError(
            f"`prompt` holds {num_prompts} prompts with `n` {n}: at most {limits.max_sequences} answers per request",
            param="prompt" if num_prompts > 1 else "n",
        )
    if num_prompts * len(body.answers_with_odds) > limits.max_sequences:
        raise InvalidRequestError(
            f"`structured_outputs.choice` holds {len(body.answers_with_odds)} answers, whose `odds` are asked for "
            f"{num_prompts} prompts: at most {limits.max_sequences} per request",
            param="structured_outputs.choice",
        )


def stop_config(body: GenerationBody) -> StopConfig:
    """The part of `body` that the text layer decides."""
    return StopConfig(
        body.stop or (), bool(body.include_stop_str_in_output), body.min_tokens or 0, nothing=body.scores_only
    )


def truncated(token_ids: list[int], body: GenerationBody, card: ModelCard) -> list[int]:
    """The end of the prompt that `truncate_prompt_tokens` asks for; -1 is what leaves room for `max_tokens`."""
    most = body.truncate_prompt_tokens
    if most is None:
        return token_ids
    if most == -1:
        most = max(1, card.max_model_len - max(1, body.max_tokens or 1))
    return token_ids[-most:]


def bad_words(body: GenerationBody, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each of `bad_words`, alone and behind a space, where that makes other tokens (as vLLM does)."""
    found = []
    for word in body.bad_words or ():
        alone, inside = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
        )
        found += [alone] if inside[:1] == alone[:1] or len(inside) != len(alone) else [alone, inside]
    return tuple(found)


def check_prompt_logprobs(field: str, num_tokens: int, top: int, limits: ApiLimits) -> None:
    """Bound what `field` asks for: `top` alternatives for each of `num_tokens` tokens of prompts."""
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
    cache_salt: str,
) -> EngineRequest:
    """One prompt's request. `max_tokens` is (field name, asked value); `default_max_tokens` None is the whole rest.

    -1 asks for the whole rest, as with llama.cpp and LM Studio.
    `max_logprobs` bounds what its choices may carry together: an output that nobody bounds ends there.
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
    )
    params.check_vocab(card.vocab_size)
    # The id is ours: a client's own could name somebody else's request.
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
    """The most tokens that each choice may have; see `engine_request`."""
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
    """Tokens left for the answer, at least 1."""
    if not token_ids:
        raise InvalidRequestError(f"`{field}` holds no tokens", param=field)
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
    """Raise `InvalidRequestError` for ids beyond the model's logits, which a text too has where an added token of the
    tokenizer is written in it."""
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < card.vocab_size:
            raise InvalidRequestError(
                f"`{field}` must hold token ids from 0 to {card.vocab_size - 1}, got {token_id}", param=field
            )


def answer_head(prefix: str, kind: str, card: ModelCard) -> dict[str, Any]:
    """The fields that every answer and every chunk of it begin with."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": card.name,
        "system_fingerprint": card.fingerprint,
    }
