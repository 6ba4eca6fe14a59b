"""What all request bodies and their parts share: strictness, and refusals that name the field."""

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

SHOWN = 64
"""Characters of a client's text that an error repeats at most."""


def refusal(message: str) -> PydanticCustomError:
    """The error of a value that cannot be taken; `message` follows the field's name."""
    # Braces are the template syntax of pydantic's custom errors.
    return PydanticCustomError("refused", "{message}", {"message": message})


def only(*allowed: object) -> AfterValidator:
    """For a field the server does not implement: null and the values that change nothing pass."""

    def check(value: object) -> object:
        if value is None or any(type(value) is type(good) and value == good for good in allowed):
            return value
        raise refusal("is not supported by this server; leave it out")

    return AfterValidator(check)


class Body(BaseModel):
    """Base of all bodies and their parts."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: object) -> object:
        # Done here and not with extra="forbid", which collects one error for each of a million fields.
        if isinstance(data, dict):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            for name in data:
                if name not in known:
                    raise PydanticCustomError(
                        "unknown_field", "is not a field this server knows", {"name": str(name)[:SHOWN]}
                    )
        return data
