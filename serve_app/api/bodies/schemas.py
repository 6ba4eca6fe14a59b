"""Request bodies: every field that the server honours, and its type.

Parsing is strict: no string becomes a number, an unknown field is refused by name, null means "not
given". Fields that are accepted without effect are listed in `ignored`. `SamplingParams` checks the
ranges of sampling parameters.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, from_json

from serve_app.api.bodies import ignored
from serve_app.api.bodies.body import MAX_CONTAINERS, SHOWN, Body, has_too_many_containers, refusal, unfit
from serve_app.api.bodies.fields import BadWord, LogitBias, MaxTokens, Prompt, Stop, TemplateVariables, TokenId, at_most
from serve_app.api.bodies.messages import MAX_MESSAGES, Message, check_parts
from serve_app.api.bodies.tools import MAX_TOOLS, Tool, ToolChoice, check_tool_choice, check_tools
from serve_app.core.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    MEANINGS,
    RANGES,
    SamplingParams,
    as_tuple,
)
from serve_app.errors import InvalidRequestError
from serve_app.text.chat_template import Ending


class StreamOptions(Body):
    """Options of a streamed answer."""

    ignores = ignored.STREAM_OPTIONS

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """With `include_usage`: every chunk carries the token counts so far, since one event may
    contain several tokens."""


class JsonSchemaFormat(Body):
    """The `json_schema` of a `response_format`. The schema is always enforced, `strict` or not."""

    name: Annotated[str, Field(max_length=64)]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise unfit("json_schema", "is required with type `json_schema`, and not allowed with other types")
        return self


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    odds: bool | None = None
    """With `choice`: return the probability of each answer. An extension of this server."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if self.odds and self.choice is None:
            raise unfit("odds", "requires `choice`")
        values = (self.json_, self.json_object, self.regex, self.choice, self.grammar)
        given = [value for value in values if value not in (None, False)]
        if len(given) != 1:
            raise refusal("must contain exactly one of json, json_object, regex, choice and grammar")
        return self


# Each field of `SamplingParams` that a client sets, optional. Bodies with another form of a field
# declare it below.
_sampling_fields: dict[str, Any] = {
    name: (kind | None, Field(None, description=MEANINGS.get(name)))
    for name, kind in SamplingParams.client_fields().items()
}
SamplingFields = create_model("SamplingFields", __base__=Body, **_sampling_fields)


class SharedBody(SamplingFields):
    """The fields of all generation endpoints: those of `SamplingParams` and others."""

    model: str | None = None
    """The served model, if given."""
    min_tokens: int | None = None
    """No end before this many tokens; at most `max_tokens`. For stop strings, reasoning tokens do
    not count."""
    logit_bias: LogitBias = None
    """Added to the logits of tokens, by token id: at most 1,024 ids, values from -100 to 100."""
    seed: int | None = None
    """The same seed gives the same tokens; random if not given."""
    stream: bool | None = None
    """Send the answer as server-sent events."""
    user: Annotated[str | None, Field(max_length=512)] = None
    """Users share the API key's share of the queue."""

    stop_token_ids: Annotated[
        list[TokenId] | None,
        Field(fail_fast=True, json_schema_extra={"maxItems": MAX_STOP_TOKEN_IDS}),
        at_most(MAX_STOP_TOKEN_IDS),
    ] = None
    """Tokens that end the answer; `stop_reason` reports which."""
    allowed_token_ids: Annotated[
        list[TokenId] | None,
        Field(fail_fast=True, min_length=1, json_schema_extra={"maxItems": MAX_ALLOWED_TOKEN_IDS}),
        at_most(MAX_ALLOWED_TOKEN_IDS),
    ] = None
    """Only these tokens are sampled. End tokens must be included."""
    bad_words: Annotated[list[BadWord] | None, Field(fail_fast=True, max_length=MAX_BAD_WORDS // 2)] = None
    """Texts of up to 256 characters that are not generated, in the tokens that each has alone or
    after a space."""
    include_stop_str_in_output: bool | None = None
    """Keep the stop string in the text."""
    priority: Annotated[int | None, Field(ge=-(2**31), lt=2**31)] = None
    """Lower runs first; requires `engine.policy: priority`. An API key bounds it."""
    cache_salt: Annotated[str | None, Field(max_length=256)] = None
    """Separates prefix caches, within those of the API key."""

    def sampling_fields(self) -> dict[str, Any]:
        """Return the given fields of `SamplingParams` that all endpoints treat alike."""
        names = SamplingParams.client_fields()
        return {name: as_tuple(value) for name in names if (value := getattr(self, name)) is not None}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        reference = super().__get_pydantic_json_schema__(core_schema, handler)
        fields = handler.resolve_ref_schema(reference)["properties"]
        for name in RANGES.keys() & SharedBody.model_fields.keys():
            low, high = RANGES[name].low, RANGES[name].high
            fields[name] |= {"exclusiveMinimum" if RANGES[name].open_low else "minimum": low, "maximum": high}
        return reference


class GenerationBody(SharedBody):
    """The fields that chat and completions share."""

    n: int | None = None
    """Number of choices; they share the prompt's KV blocks."""
    max_tokens: MaxTokens = None
    """Per choice; must fit the context together with the prompt. -1 is the rest of the context. 0
    scores the prompt, with `echo` or `prompt_logprobs`. Default: 16 for completions, the rest of
    the context for chat."""
    stop: Stop = None
    """Stop strings: texts that end the answer and are left out of it."""
    stream_options: StreamOptions | None = None
    """`include_usage`, and `continuous_usage_stats` for token counts in every chunk; requires
    `stream`."""
    structured_outputs: StructuredOutputs | None = None
    """Constrained output: one of `json`, `json_object`, `regex`, `choice` (optionally with `odds`),
    `grammar`."""
    return_token_ids: bool | None = None
    """Return `token_ids` in choices and chunks, and `prompt_token_ids` in the answer (chat) or the
    choices."""
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    """Log-probabilities of prompt tokens, with this many alternatives, in vLLM's format; not with
    `stream`."""
    truncate_prompt_tokens: Annotated[
        int | None, WithJsonSchema({"type": ["integer", "null"], "minimum": -1, "not": {"const": 0}})
    ] = None
    """Use only this many tokens at the end of the prompt; -1 leaves room for `max_tokens`. A text
    longer than twice the context is still refused."""

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise unfit("stream_options", "may only be set when `stream` is true")
        if self.stream and self.prompt_logprobs is not None:
            raise unfit("prompt_logprobs", "cannot be combined with `stream`")
        if self.truncate_prompt_tokens is not None and not -1 <= self.truncate_prompt_tokens != 0:
            raise unfit("truncate_prompt_tokens", "must be at least 1, or -1")
        if self.stream and self.answers_with_odds:
            raise unfit("structured_outputs.odds", "cannot be combined with `stream`")
        return self

    @property
    def num_choices(self) -> int:
        """Number of generated choices."""
        return self.n or 1

    @property
    def scores_only(self) -> bool:
        """Whether only the prompt's log-probabilities are requested, without output."""
        return self.max_tokens == 0 and self.prompt_logprobs is not None

    @property
    def answers_with_odds(self) -> tuple[str, ...]:
        """The distinct answers whose odds are requested."""
        asked = self.structured_outputs
        return () if asked is None or not asked.odds else tuple(dict.fromkeys(asked.choice or ()))

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with the usage."""
        options = self.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether every chunk contains the usage so far."""
        options = self.stream_options
        return options is not None and bool(options.include_usage and options.continuous_usage_stats)


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    ignores = ignored.CHAT

    messages: Annotated[
        list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), BeforeValidator(check_parts)
    ]
    """The conversation so far."""
    max_completion_tokens: MaxTokens = None
    """The newer name of `max_tokens`."""
    logprobs: bool | None = None
    """Return log-probabilities of content tokens, without reasoning and tool calls."""
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    """Alternatives per token; requires `logprobs`."""

    parallel_tool_calls: bool | None = None
    """False: at most one call. Default: true, or false with a named tool."""
    response_format: ResponseFormat | None = None
    """`text`, `json_object` or `json_schema`; the schema is enforced, `strict` or not."""
    thinking_token_budget: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    """Maximum number of reasoning tokens; the server then closes the reasoning."""
    reasoning_effort: ReasoningEffort | None = None
    """Passed to the chat template as far as it supports it."""
    tools: Annotated[
        list[Tool] | None, AfterValidator(check_tools), Field(json_schema_extra={"maxItems": MAX_TOOLS})
    ] = None
    """Functions that the model may call; at most 262,144 bytes of JSON."""
    tool_choice: Annotated[ToolChoice, BeforeValidator(check_tool_choice, json_schema_input_type=ToolChoice)] = None
    """`none`, `auto`, `required`, a named tool, or `allowed_tools`."""
    add_generation_prompt: bool | None = None
    """False: the prompt ends with the last message. Default: true."""
    continue_final_message: bool | None = None
    """Continue the assistant's last message; the answer contains the new text only."""
    chat_template_kwargs: TemplateVariables = None
    """Variables of the model's chat template: `enable_thinking`, `thinking`, `preserve_thinking`,
    `date_string`."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise unfit("top_logprobs", "requires `logprobs: true`")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise unfit("max_completion_tokens", "differs from `max_tokens`")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise unfit("tool_choice", "requires `tools`")
        last = self.messages[-1]
        if self.continue_final_message and self.add_generation_prompt:
            raise unfit("continue_final_message", "cannot be combined with `add_generation_prompt: true`")
        if self.continue_final_message and (last.role != "assistant" or not last.text or last.tool_calls):
            raise unfit("continue_final_message", "requires a text message of the assistant as the last message")
        return self

    @property
    def ending(self) -> Ending:
        """The end of the prompt: an open answer, a message, or a message to continue."""
        if self.continue_final_message:
            return Ending.CONTINUED
        return Ending.MESSAGE if self.add_generation_prompt is False else Ending.ANSWER


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    ignores = ignored.COMPLETION

    prompt: Prompt
    """A text, token ids, or a list of either."""
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    """Alternatives per token; 0 returns the sampled token's own log-probability."""
    echo: bool | None = None
    """Return the prompt in front of the text."""
    add_special_tokens: bool | None = None
    """Add the special tokens that the tokenizer puts around a text. Default: true."""
    suffix: str | None = None
    """Text after the gap, for tokenizers with fill-in-the-middle marks (Qwen 2.5 Coder, StarCoder,
    DeepSeek Coder,
    Code Llama, CodeGemma); not with `echo` or `truncate_prompt_tokens`."""
    best_of: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    """Number of generated choices, at least `n`; the `n` with the highest log-probability per token
    are returned, best first. `usage` counts all. Not with `stream`."""

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise unfit("best_of", "must be at least `n`")
        if self.stream and self.chooses_best:
            raise unfit("best_of", "above `n` cannot be combined with `stream`")
        if self.suffix and (self.echo or self.truncate_prompt_tokens is not None):
            raise unfit("suffix", "cannot be combined with `echo` or `truncate_prompt_tokens`")
        return self

    @property
    def num_choices(self) -> int:
        """Number of generated choices per prompt."""
        return max(self.n or 1, self.best_of or 1)

    @property
    def chooses_best(self) -> bool:
        """Whether fewer choices are returned than generated."""
        return self.num_choices > (self.n or 1)

    @property
    def scores_only(self) -> bool:
        """Whether the answer contains the prompt and no output."""
        return self.max_tokens == 0 and bool(self.echo or self.prompt_logprobs is not None)


BodyT = TypeVar("BodyT", bound=Body)


def parse_body(kind: type[BodyT], raw: bytes) -> BodyT:
    """Return the body in `raw`, which is JSON.

    Raises an `InvalidRequestError` that names the field. The error keeps no part of the body alive.
    """
    return _or_raise(_read(kind, raw))


def validate(kind: type[BodyT], data: dict[str, Any]) -> BodyT:
    """Return the body with these fields. Raises `InvalidRequestError` like `parse_body`."""
    return _or_raise(_validated(kind, data))


def _read(kind: type[BodyT], raw: bytes) -> BodyT | InvalidRequestError:
    if has_too_many_containers(raw):
        message = f"the body may contain at most {MAX_CONTAINERS} JSON objects and arrays"
        return InvalidRequestError(message, code="invalid_json")
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        return InvalidRequestError(f"the body is not valid JSON: {error}", code="invalid_json")
    if not isinstance(data, dict):
        return InvalidRequestError("the body must be a JSON object", code="invalid_json")
    return _validated(kind, data)


def _validated(kind: type[BodyT], data: dict[str, Any]) -> BodyT | InvalidRequestError:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        return _explain(error)


def _or_raise(result: BodyT | InvalidRequestError) -> BodyT:
    """Return the result, or raise it if it is an error.

    An error keeps the frames alive through which it was raised. It is raised here because no frame
    from here on refers to parsed data, which may be 40 MiB for 4 MiB of JSON. Many such errors may
    wait until the event loop answers them.
    """
    try:
        if isinstance(result, InvalidRequestError):
            raise result
        return result
    finally:
        del result


def _explain(error: ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False, include_input=False)[0]
    path = list(first["loc"])
    context = first.get("ctx", {})
    if first["type"] in ("unknown_field", "unfit"):
        path.append(context["name"])
    names = (f"[{part}]" if isinstance(part, int) else f".{part[:SHOWN]}" for part in path)
    param = "".join(names).lstrip(".")
    message = _MESSAGES.get(first["type"], _plain)(first["msg"])
    code = "unknown_field" if first["type"] == "unknown_field" else None
    return InvalidRequestError(f"`{param}` {message}", param=param, code=code)


def _plain(message: str) -> str:
    """Return pydantic's message, changed to follow the field's name."""
    for old, new in (("Input should be ", "must be "), ("List should ", "must "), ("String should ", "must ")):
        if message.startswith(old):
            return new + message.removeprefix(old)
    return message[:1].lower() + message[1:]


_MESSAGES: dict[str, Callable[[str], str]] = {
    "missing": lambda _: "is required",
    "model_type": lambda _: "must be an object",
}
