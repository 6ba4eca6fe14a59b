"""Types of fields that accept several forms: validation, conversion and the schema in
/openapi.json."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from serve_app.api.bodies.body import SHOWN, refusal, unfit
from serve_app.core.sampling_params import BIASES, MAX_LOGIT_BIAS, RANGES

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256


def at_most(count: int) -> BeforeValidator:
    """Return a validator that refuses a longer list before its items are validated."""

    def check(value: object) -> object:
        if isinstance(value, list) and len(value) > count:
            raise refusal(f"may contain at most {count} ids")
        return value

    return BeforeValidator(check)


def _check_stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or len(stops) > MAX_STOP_STRINGS:
        raise refusal(f"must be a string or a list of at most {MAX_STOP_STRINGS} strings")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARS:
            raise refusal(f"must contain strings of 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _check_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise refusal(f"must be an object of at most {MAX_LOGIT_BIAS} token ids and their biases")
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10):
            raise unfit(key[:SHOWN], "is not a token id; keys are numbers in quotes")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise unfit(key, "must be a number")
    return tuple((int(key), float(bias)) for key, bias in value.items())


def _check_template_kwargs(value: dict[str, Any] | None) -> dict[str, Any] | None:
    for given in (value or {}).values():
        if not isinstance(given, bool | int) and not (isinstance(given, str) and len(given) <= MAX_STOP_CHARS):
            raise refusal(f"must contain only booleans, integers or strings of at most {MAX_STOP_CHARS} characters")
    return value


def _is_ids(value: object) -> bool:
    # a million of them in milliseconds
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _check_prompt(value: object) -> list[str] | list[list[int]]:
    """Return the prompt, in any of four forms, as a list of texts or of lists of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if _is_ids(value):
            return [value]
        if all(_is_ids(item) for item in value):
            return value
    raise refusal("must be a string, a list of strings, a list of token ids, or a list of such lists")


_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_STOP_STRINGS = {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOP_STRINGS}
Stop = Annotated[
    Any,
    AfterValidator(lambda v: None if v is None else _check_stop(v)),
    WithJsonSchema({"anyOf": [_STOP_STRING, _STOP_STRINGS, {"type": "null"}]}),
]

LogitBias = Annotated[
    Any,
    AfterValidator(lambda v: None if v is None else _check_logit_bias(v)),
    WithJsonSchema(
        {
            "type": ["object", "null"],
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": BIASES.low, "maximum": BIASES.high},
            "maxProperties": MAX_LOGIT_BIAS,
        }
    ),
]

_VARIABLE = {"type": ["boolean", "integer", "string"], "maxLength": MAX_STOP_CHARS}
TemplateVariables = Annotated[
    dict[str, Any] | None,
    AfterValidator(_check_template_kwargs),
    WithJsonSchema({"type": ["object", "null"], "additionalProperties": _VARIABLE}),
]

BadWord = Annotated[str, Field(max_length=MAX_STOP_CHARS, pattern=r"\S")]
TokenId = Annotated[int, Field(ge=0)]
_Prompts = Annotated[list[str], Field(min_length=1)] | Annotated[list[list[TokenId]], Field(min_length=1)]
Prompt = Annotated[
    Any,
    BeforeValidator(
        _check_prompt, json_schema_input_type=str | Annotated[list[TokenId], Field(min_length=1)] | _Prompts
    ),
]
MaxTokens = Annotated[int | None, Field(json_schema_extra={"minimum": -1, "maximum": RANGES["max_tokens"].high})]
"""-1 is the rest of the context."""
