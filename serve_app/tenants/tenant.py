"""The permissions and limits of one tenant: the fields of an entry of the keys file."""

from datetime import UTC, date, datetime
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""The form of key and group names, safe in logs, labels and file formats."""
LOWEST_PRIORITY = 2**31 - 1


def _utc(value: Any) -> Any:
    """Return the time of a YAML date (its start) or time. Without a zone it is in UTC."""
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) and value.tzinfo is None else value


class Tenant(BaseModel):
    """A client with a key, or all clients without one (`ANONYMOUS`).

    Compared by all fields; `name` is unique. A limit of None is no limit.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: str
    expires: Annotated[AwareDatetime | None, BeforeValidator(_utc)] = None
    """The key is refused from this time on."""
    models: list[str] | None = Field(default=None, min_length=1)
    """Served models that the tenant may see and use; None is all."""
    weight: int = Field(default=1, ge=1, le=1000)
    """Weight of the tenant's share of the queue, relative to other tenants."""
    priority: list[int] = Field(default=[0, LOWEST_PRIORITY], min_length=2, max_length=2)
    """Lowest and highest `priority` that its requests may ask for; lower is served first."""
    max_sequences: int | None = Field(default=None, ge=1)
    """Maximum concurrent sequences (prompts times `n`), including waiting ones."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Maximum requests that generate or tokenize within any 60 seconds."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Maximum tokens of prompts and outputs, for the requests that arrive within any 60 seconds."""
    tokens_per_day: int | None = Field(default=None, ge=1)
    """Maximum tokens of prompts and outputs per UTC day."""
    prefix_group: str | None = Field(default=None, pattern=NAME)
    """Tenants of the same group share cached prefixes; None: no sharing."""
    admin: bool = False
    """Whether the tenant may use metrics and `/debug`, which show data of all clients."""

    @model_validator(mode="after")
    def _check_priority(self) -> "Tenant":
        if self.priority[0] > self.priority[1]:
            raise ValueError("priority: the lowest number must come first")
        return self

    def may_use(self, model: str) -> bool:
        """Whether the tenant may see and use the served model of this name."""
        return self.models is None or model in self.models

    def cache_salt(self, given: str) -> str:
        """Return the prefix cache salt for a request with salt `given`.

        It is unique to the tenant or its group.
        """
        if not self.name:
            return f"\0anonymous\0{given}" if given.startswith("\0") else given
        kind, group = ("key", self.name) if self.prefix_group is None else ("group", self.prefix_group)
        return f"\0{kind} {group}\0{given}"


ANONYMOUS = Tenant(name="")
"""All clients without a known key. They share one queue."""
