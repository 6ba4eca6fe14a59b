"""From a checked body to engine requests: model name, prompt length, output length, sampling parameters, seed."""

import asyncio
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from serve_app.api.schemas import GenerationBody, Message
from serve_app.api.service import ApiLimits, ModelCard
from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from serve_app.text.stream import StopConfig
from serve_app.text.tokenizer import Tokenizer

_LONG_TEXT = 8192
"""Characters (about 2 ms of tokenizing) from which the work leaves the event loop."""
_MESSAGE = 64
"""A message costs its template as much time as so many characters, however empty it is."""
_workers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")

_SAMPLING_FIELDS = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop_token_ids",
    "ignore_eos",
)

T = TypeVar("T")


async def off_loop(work: Callable[[], T], size: int) -> T:
    """Run text work of this size (characters or tokens): here if it is small, else beside the event loop."""
    if size < _LONG_TEXT:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_workers, work)


async def encode_prompt(
    tokenizer: Tokenizer, text: str, card: ModelCard, *, add_special_tokens: bool = True
) -> list[int]:
    """Ids of a text prompt. Raises `ContextLengthError` without tokenizing what is far beyond the context."""
    _check_size(tokenizer, text, card, "prompt")
    return await off_loop(partial(tokenizer.encode, text, add_special_tokens=add_special_tokens), len(text))


async def encode_messages(tokenizer: Tokenizer, messages: Sequence[Message], card: ModelCard) -> list[int]:
    """Ids of a chat; errors as `encode_prompt` and `Tokenizer.apply_chat_template`."""
    plain = [message.for_template() for message in messages]
    text = "".join(message["content"] for message in plain)
    _check_size(tokenizer, text, card, "messages")
    return await off_loop(partial(tokenizer.apply_chat_template, plain), len(text) + _MESSAGE * len(plain))


def _check_size(tokenizer: Tokenizer, text: str, card: ModelCard, field: str) -> None:
    if (least := tokenizer.min_tokens(text)) >= card.max_model_len:
        raise ContextLengthError(
            f"`{field}` has at least {least} tokens, but this model's context holds {card.max_model_len}", param=field
        )


def check_model(name: str | None, card: ModelCard) -> None:
    """Raise `ModelNotFoundError` unless `name` is the served model (or not given)."""
    if name is not None and name != card.name:
        raise ModelNotFoundError(
            f"the model {name[:100]!r} does not exist; GET /v1/models lists what is served", param="model"
        )


def check_sequences(num_prompts: int, body: GenerationBody, limits: ApiLimits) -> None:
    """Bound prompts times choices before anything is computed for them."""
    n = 1 if body.n is None else body.n
    SamplingParams(n=n)
    if num_prompts * n > limits.max_sequences:
        raise InvalidRequestError(
            f"`prompt` holds {num_prompts} prompts with `n` {n}: at most {limits.max_sequences} answers per request",
            param="prompt" if num_prompts > 1 else "n",
        )


def stop_config(body: GenerationBody) -> StopConfig:
    """The part of `body` that the text layer decides."""
    return StopConfig(body.stop or (), bool(body.include_stop_str_in_output), body.min_tokens or 0)


def engine_request(
    body: GenerationBody,
    token_ids: list[int],
    card: ModelCard,
    *,
    prompt_field: str,
    max_tokens: tuple[str, int | None],
    default_max_tokens: int | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> EngineRequest:
    """One prompt's request. `max_tokens` is (field name, asked value); `default_max_tokens` None is the whole rest.

    Raises `InvalidRequestError` naming the field and its limit.
    """
    room = _room(token_ids, card, prompt_field)
    name, asked = max_tokens
    if asked is not None and asked < 1:
        raise InvalidRequestError(f"`{name}` must be at least 1, got {asked}", param=name)
    if asked is not None and asked > room:
        raise ContextLengthError(
            f"`{name}` is {asked}, but this model's context of {card.max_model_len} tokens leaves {room} "
            f"after the {len(token_ids)} tokens of `{prompt_field}`",
            param=name,
        )
    limit = asked if asked is not None else min(room if default_max_tokens is None else default_max_tokens, room)
    given: dict[str, Any] = {f: value for f in _SAMPLING_FIELDS if (value := getattr(body, f)) is not None}
    if "stop_token_ids" in given:
        given["stop_token_ids"] = tuple(given["stop_token_ids"])
    params = SamplingParams(
        **given,
        max_tokens=limit,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    params.check_vocab(card.vocab_size)
    # The id is ours: a client's own could name somebody else's request.
    return EngineRequest(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=tuple(token_ids),
        params=params,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
    )


def _room(token_ids: list[int], card: ModelCard, field: str) -> int:
    """Tokens left for the answer, at least 1."""
    if not token_ids:
        raise InvalidRequestError(f"`{field}` holds no tokens", param=field)
    if not 0 <= min(token_ids) <= max(token_ids) < card.vocab_size:
        raise InvalidRequestError(f"`{field}` must hold token ids from 0 to {card.vocab_size - 1}", param=field)
    room = card.max_model_len - len(token_ids)
    if room < 1:
        raise ContextLengthError(
            f"`{field}` has {len(token_ids)} tokens, but this model's context holds {card.max_model_len}, "
            "at least one of them for the answer",
            param=field,
        )
    return room


def answer_head(prefix: str, kind: str, card: ModelCard) -> dict[str, Any]:
    """The fields that every answer and every chunk of it begin with."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": card.name,
        "system_fingerprint": card.fingerprint,
    }
