"""POST /v1/embeddings: texts or token ids in, one vector of length 1 for each out.

Each input is an engine request for one token, which is dropped (see
`SamplingParams.for_embedding`). The inputs of a request share at most half of the engines' slots,
so that other requests can run.
"""

import base64
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
import orjson
from pydantic import AfterValidator, Field, model_validator

from serve_app.api.bodies import ignored
from serve_app.api.bodies.body import Body, refusal, unfit
from serve_app.api.bodies.fields import Prompt
from serve_app.api.bodies.schemas import GenerationBody
from serve_app.api.endpoint import ApiContext, Choice
from serve_app.api.generation import Generation, Usage
from serve_app.api.prepare import check_ids, check_model, encode_prompts, off_loop
from serve_app.core.request import EngineRequest
from serve_app.core.results import EMBEDDING
from serve_app.core.sampling_params import Pooling, SamplingParams
from serve_app.errors import ContextLengthError, InvalidRequestError
from serve_app.tenants.tenant import Tenant
from serve_app.text.stream import StopConfig

MAX_INPUTS = 2048


def _check_count(inputs: list[str] | list[list[int]]) -> list[str] | list[list[int]]:
    if len(inputs) > MAX_INPUTS:
        raise refusal(f"may contain at most {MAX_INPUTS} inputs")
    return inputs


class EmbeddingsBody(Body):
    """POST /v1/embeddings."""

    ignores = ignored.EMBEDDINGS

    model: str | None = None
    """The served model, if given."""
    input: Annotated[Prompt, AfterValidator(_check_count)]
    """A text, token ids, or a list of either; at most 2,048, none empty, each within the
    context."""
    dimensions: Annotated[int | None, Field(ge=1)] = None
    """Return the first `dimensions` numbers, normalized to length 1; at most the hidden size, which
    is the default."""
    encoding_format: Literal["float", "base64"] | None = None
    """`base64` is little-endian float32, and faster. Default: `float`."""
    user: Annotated[str | None, Field(max_length=512)] = None
    """Users share the API key's share of the queue."""
    pooling: Pooling | None = None
    """Hidden state of the last token, or the mean over all tokens. Default: the checkpoint's
    setting, else `last`."""
    add_special_tokens: bool | None = None
    """Add the special tokens that the tokenizer puts around a text. Default: true."""
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1)] = None
    """Use only this many tokens at the end of each input; -1 is the context length."""
    priority: Annotated[int | None, Field(ge=-(2**31), lt=2**31)] = None
    """Lower runs first; requires `engine.policy: priority`. An API key bounds it."""

    @model_validator(mode="after")
    def _check_truncation(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            raise unfit("truncate_prompt_tokens", "must be at least 1, or -1")
        return self


class EmbeddingsJob:
    """One parsed request for embeddings."""

    stream = False
    stop = StopConfig(nothing=True)

    def __init__(self, context: ApiContext, asked: EmbeddingsBody, tenant: Tenant) -> None:
        """Raises `InvalidRequestError`, `ModelNotFoundError`, `UnavailableError`."""
        self.body = GenerationBody(user=asked.user, priority=asked.priority)
        self._asked = asked
        self._context = context
        self._card = card = context.service.model
        check_model(asked.model, card)
        inputs = asked.input
        self._inputs: dict[str, Any] = {
            "input" if len(inputs) == 1 else f"input[{i}]": one for i, one in enumerate(inputs)
        }
        for name, one in self._inputs.items():
            if not one:
                raise InvalidRequestError(f"`{name}` must not be empty", param=name)
        self._params = SamplingParams.for_embedding(asked.pooling or card.pooling, asked.dimensions)
        self._params.check_dimensions(card.hidden_size)
        most = context.limits.max_embedding_numbers // (asked.dimensions or card.hidden_size)
        if len(inputs) > most:
            raise InvalidRequestError(
                f"`input` must have at most {most} inputs with {asked.dimensions or card.hidden_size} dimensions each",
                param="input",
            )
        half = max(1, context.admission.max_ongoing // 2)
        self.num_prompts = min(len(inputs), half, context.limits.max_sequences, tenant.max_sequences or MAX_INPUTS)

    async def engine_requests(self, cache_salt: str) -> list[EngineRequest]:
        """Tokenize and validate. Returns one request per input."""
        token_ids: Sequence[list[int]] = [*self._inputs.values()]
        if isinstance(token_ids[0], str):
            special = self._asked.add_special_tokens is not False
            tokenizer = self._context.service.tokenizer
            token_ids = await encode_prompts(tokenizer, self._inputs, self._card, add_special_tokens=special)
        named = zip(self._inputs, token_ids, strict=True)
        return await off_loop(lambda: [self._request(*each, cache_salt) for each in named], sum(map(len, token_ids)))

    def _request(self, name: str, token_ids: list[int], cache_salt: str) -> EngineRequest:
        card, most = self._card, self._asked.truncate_prompt_tokens
        if most is not None:
            token_ids = token_ids[-(card.max_model_len if most == -1 else most) :]
        if not token_ids:
            raise InvalidRequestError(f"`{name}` contains no tokens", param=name)
        if len(token_ids) > card.max_model_len:
            raise ContextLengthError(
                f"`{name}` has {len(token_ids)} tokens, but this model's context is {card.max_model_len}", param=name
            )
        check_ids(token_ids, card, name)
        priority = self._asked.priority or 0
        return EngineRequest(uuid.uuid4().hex, tuple(token_ids), self._params, cache_salt=cache_salt, priority=priority)

    def wire(self, generation: Generation) -> Any:
        """Return the wire. It has no methods for streams."""
        generation.keep = _base64 if self._asked.encoding_format == "base64" else _numbers
        return EmbeddingsWire(self._card.name, generation)


class EmbeddingsWire:
    """OpenAI's list of embeddings."""

    def __init__(self, model: str, generation: Generation) -> None:
        self._model = model
        self._generation = generation

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """Return a `CreateEmbeddingResponse`."""
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": i, "embedding": results[EMBEDDING][0]}
                for i, results in enumerate(self._generation.results)
            ],
            "model": self._model,
            "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens},
        }


def _base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()


def _numbers(vector: bytes) -> orjson.Fragment:
    """Format a vector as it arrives: formatting all at the end would block the event loop."""
    return orjson.Fragment(orjson.dumps(np.frombuffer(vector, "<f4"), option=orjson.OPT_SERIALIZE_NUMPY))
