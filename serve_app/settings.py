"""The one tree of settings.

Decides which knobs exist, their defaults and their limits. The builder, the ingress and the
launcher read it and hand plain dataclasses down; nothing below `api` sees pydantic. `setting_rows`
is what docs/settings.md is made from.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from serve_app.core import autosize
from serve_app.core.autosize import max_slots
from serve_app.errors import ConfigError

ANY_NAME = "*"
"""Among the served names: requests may name any model."""
_SPARE_REQUESTS = 256


class _Frozen(BaseModel):
    # `protected_namespaces` is empty because pydantic reserves the prefix `model_`, which `model`
    # and its like need.
    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True
    )


def _auto_or_up_to(most: int) -> PlainValidator:
    """By hand, because pydantic's report of a union says each alternative's problem."""

    def check(value: object) -> object:
        if value == "auto" or (type(value) is int and 1 <= value <= most):
            return value
        raise PydanticCustomError("auto_or_number", f"must be `auto` or an integer from 1 to {most}")

    return PlainValidator(check)


def _auto_null_or_positive() -> PlainValidator:
    def check(value: object) -> object:
        if value is None or value == "auto" or (type(value) is int and value >= 1):
            return value
        raise PydanticCustomError("auto_null_or_number", "must be `auto`, null or an integer from 1")

    return PlainValidator(check)


def _one_or_more_names() -> PlainValidator:
    def check(value: object) -> object:
        names = value if isinstance(value, list) else [value]
        if value is None or (names and all(isinstance(name, str) and name.strip() for name in names)):
            return value
        raise PydanticCustomError("names", "must be a name or a list of names, or null")

    return PlainValidator(check)


class EngineSettings(_Frozen):
    """The engine of each replica."""

    max_num_seqs: Annotated[int | Literal["auto"], _auto_or_up_to(4096)] = "auto"
    """Slots of a replica; each of `n` choices takes one; `auto` = as many as KV pool and step time
    allow, 16 to 256."""
    max_num_batched_tokens: Annotated[int | Literal["auto"], _auto_or_up_to(1_048_576)] = "auto"
    """Maximum tokens in a step, prefill and decode together; `auto` = as many as step time allows,
    up to 8192."""
    max_model_len: Annotated[int | Literal["auto"] | None, _auto_null_or_positive()] = "auto"
    """Longest prompt plus output, in tokens; `auto` = as much of the model's context as the KV pool
    holds; null = all of it. Decides `longrope`'s frequencies."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """Maximum size of the KV pool in GiB; null = what measured memory allows (on a CPU at most
    4)."""
    memory_fraction: float = Field(default=0.8, gt=0, le=1)
    """Fraction of the free memory for the KV pool, measured after loading and one step of maximum
    size; CUDA graphs need the rest."""
    policy: Literal["fcfs", "priority", "static"] = "fcfs"
    """`fcfs` = by arrival; `priority` = lowest `priority` of a request first; `static` = closed
    batches (baseline)."""
    prefill: Literal["fused", "separate"] = "fused"
    """`fused` = prompts share steps with decodes; `separate` = prompts get their own steps while
    decodes pause."""
    waiting_served_ratio: float = Field(default=0.0, ge=0, le=1000)
    """Admit waiting requests once waiting >= running x this ratio; 0 = always."""
    max_wait_s: float = Field(default=1.0, ge=0, le=3600)
    """Admit anyway once the oldest request has waited this many seconds."""
    max_waiting_steps: int = Field(default=20, ge=1, le=1_000_000)
    """Admit anyway after this many steps without an admission."""
    enable_prefix_cache: bool = True
    """Share the KV blocks of prompts that begin alike."""
    speculation: Literal["auto", "off"] = "auto"
    """`auto` = prompt-lookup speculation where it saves time; same tokens as without."""
    deterministic: bool = False
    """On GPUs, batch-invariant results, at a lower speed. Results on CPUs are always
    batch-invariant."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """`fp8` = keys and values in 8 bits, on GPUs: twice the tokens; `auto` = by mode
    (docs/precision.md)."""
    max_num_waiting: int | None = Field(default=None, ge=0, le=1_000_000)
    """Sequences that may wait in a replica for its admission gate; null = `max_num_seqs`."""
    stall_timeout_s: float | None = Field(default=None, gt=0, le=3600)
    """Seconds after which a replica whose step has not ended is replaced; null = 5 largest steps,
    at least 10."""
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of each replica's model; null = the machine's cores divided by the number of
    replicas."""


class IngressSettings(_Frozen):
    """The HTTP side: access, request limits, queue."""

    keys_file: str | None = Field(default=None, min_length=1)
    """YAML file of API keys (`serve-app keys`), reloaded on change; null = no keys, every client
    has full access."""
    allow_anonymous: bool = False
    """Serve requests without a key, beside a keys file or (without one) beyond this machine."""
    allowed_hosts: list[str] | None = None
    """Accepted host names, without ports; null = loopback's names if it listens there, else any."""
    allowed_origins: list[str] = []
    """Origins of other web pages that may send requests (`https://chat.example.org`)."""
    ledger_folder: str | None = Field(default=None, min_length=1)
    """Folder for the usage ledger, one JSON line per request; null = no ledger."""
    share_prefixes: bool = False
    """Share the prefix cache between all keys; each key can then detect prompts of others."""
    max_queued_requests: int = Field(default=128, ge=0, le=1_000_000)
    """Sequences (prompts times `n`) that may wait at the ingress; further requests are answered
    429."""
    max_body_mib: float = Field(default=4.0, gt=0, le=1024)
    """Largest request body in MiB; a larger one is answered 413."""
    body_timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Seconds that a client may take to send a body."""
    max_unfinished_per_source: int = Field(default=2048, ge=1, le=1_000_000)
    """Maximum connections of one address without a complete request; further ones are closed."""
    request_timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """Seconds until a request ends with a timeout error; the header `x-request-timeout` may lower
    it."""
    failover_wait_s: float = Field(default=30.0, ge=0, le=3600)
    """Seconds that a request waits for a replica when none is left."""
    drain_timeout_s: float = Field(default=60.0, ge=0, le=86_400)
    """Seconds after a stop signal until running requests end with an error."""
    stream_interval_ms: float = Field(default=50.0, ge=0, le=60_000)
    """Minimum time between two events of a stream from 16 sequences on, less with fewer; 0 = one
    event per step."""
    tools: Literal["auto", "hermes"] = "auto"
    """Form of tool calls: `auto` = the chat template's; `hermes` = Hermes', described in a system
    prompt."""
    otlp_endpoint: str | None = Field(default=None, pattern=r"https?://.+")
    """OpenTelemetry collector for a span of every request, OTLP over HTTP
    (`http://127.0.0.1:4318`)."""


class AutoscalingSettings(_Frozen):
    """The number of engine replicas follows the load: running and waiting sequences, and full KV
    pools."""

    min_replicas: int = Field(default=1, ge=1, le=1024)
    """Minimum number of engine replicas."""
    max_replicas: int = Field(default=2, ge=1, le=1024)
    """Maximum number of engine replicas."""
    upscale_delay_s: float = Field(default=10.0, ge=0, le=86_400)
    """Seconds of high load before replicas are added."""
    downscale_delay_s: float = Field(default=300.0, ge=0, le=86_400)
    """Seconds of low load before replicas are removed."""


class Settings(_Frozen):
    """`args` of the application in `deploy/*.yaml`. Unknown keys and invalid values are refused by
    name."""

    model: str = Field(default="default", min_length=1)
    """`default` (SmolLM2-135M-Instruct), a local folder, a `.gguf` file or a hub id (main at start,
    or `@commit`)."""
    ignore_model_keys: list[str] = []
    """Unsupported keys of a GGUF file, `config.json` or `generation_config.json` to load the model
    without."""
    served_model_name: Annotated[str | list[str] | None, _one_or_more_names()] = None
    """The model's name in the API, or a list of names; `"*"` in the list accepts any name; null =
    the model's own name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Dtype of products, weights and KV cache; `auto` = float32 on CPUs, the file's 16-bit dtype on
    GPUs."""
    quantization: Literal["auto", "none", "int8", "fp8"] = "auto"
    """`none` = exact; `int8` = 8 bits, on CPUs; `fp8` = 8 bits, on GPUs; `auto` = `int8` where it
    works, in float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; `auto` = one GPU per replica if Ray's cluster has GPUs, else the
    CPU."""
    num_replicas: int = Field(default=1, ge=1, le=1024)
    """Number of engine replicas; not allowed with `autoscaling`."""
    autoscaling: AutoscalingSettings | None = None
    """Adjust the number of engine replicas to the load; null = `num_replicas`."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1)
    """Address of the metrics ports; `node` = each node's own address, for clusters of several
    nodes."""
    engine: EngineSettings = EngineSettings()
    ingress: IngressSettings = IngressSettings()

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names of the model in the API besides `"*"`; empty for its own name."""
        names = self.served_model_name
        return tuple(name for name in ([names] if isinstance(names, str) else names or ()) if name != ANY_NAME)

    @property
    def serves_any_name(self) -> bool:
        """Whether requests may name any model."""
        return self.served_model_name == ANY_NAME or ANY_NAME in (self.served_model_name or ())

    @property
    def most_step_tokens(self) -> int:
        """Tokens in one step; with `auto`, the largest number that a replica may choose."""
        tokens = self.engine.max_num_batched_tokens
        return autosize.MAX_STEP_TOKENS if tokens == "auto" else tokens

    @property
    def max_slots(self) -> int:
        """Slots of one replica; with `auto`, the largest number that it may choose."""
        slots = self.engine.max_num_seqs
        return max_slots(self.most_step_tokens) if slots == "auto" else slots

    def with_chosen(self, **engine: int) -> "Settings":
        """These settings with the values that a replica's engine has chosen."""
        return self.model_copy(update={"engine": self.engine.model_copy(update=engine)})

    @property
    def max_num_waiting(self) -> int:
        """Requests that one replica holds beyond its slots."""
        waiting = self.engine.max_num_waiting
        return self.max_slots if waiting is None else waiting

    @property
    def max_ongoing_per_replica(self) -> int:
        """Maximum number of requests in one replica."""
        return self.max_slots + self.max_num_waiting

    @property
    def max_replicas(self) -> int:
        """Maximum number of engine replicas."""
        return self.num_replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @property
    def max_ongoing_requests(self) -> int:
        """Maximum number of requests in `max_replicas` replicas; the others wait at the ingress."""
        return self.max_replicas * self.max_ongoing_per_replica

    @property
    def max_requests(self) -> int:
        """Maximum number of requests that are in engines or wait at the ingress."""
        return self.max_ongoing_requests + self.ingress.max_queued_requests

    @property
    def ingress_requests(self) -> int:
        """Maximum number of HTTP requests in the ingress: `max_requests`, as many whose body is
        still arriving, and a reserve.

        The reserve serves refusals, and requests that need no slot (models, metrics, tokenize).
        Streams cannot use it, because requests beyond `max_requests` are refused.
        """
        return 2 * self.max_requests + self.ingress.max_unfinished_per_source + _SPARE_REQUESTS

    @model_validator(mode="after")
    def _check_replicas(self) -> "Settings":
        limits = self.autoscaling
        if limits is not None and "num_replicas" in self.model_fields_set:
            raise ConfigError("setting `num_replicas`: cannot be combined with `autoscaling`; remove one of them")
        if limits is not None and limits.max_replicas < limits.min_replicas:
            raise ConfigError(
                f"setting `autoscaling.max_replicas`: must be at least `min_replicas` ({limits.min_replicas}), "
                f"got {limits.max_replicas}"
            )
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_in_one_line(cls, data: Any, handler: ModelWrapValidatorHandler["Settings"]) -> "Settings":
        """Raise pydantic's errors as a one-line `ConfigError`, which Ray's logs keep whole."""
        if not isinstance(data, Settings | Mapping):
            raise ConfigError(f"the application's args must be a mapping of settings, got {_shown(data)}")
        try:
            return handler(data)
        except ValidationError as error:
            raise ConfigError("; ".join(_explain(cls, item) for item in error.errors())) from None


def setting_rows(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (key, default, meaning) of every setting, in the order of the tree."""
    for name, field in model.model_fields.items():
        section = _section(field)
        if section is None or field.default is None:
            default = "null" if field.default is None else str(field.default).lower()
            yield f"{prefix}{name}", default, " ".join((field.description or "").split())
        if section is not None:
            yield from setting_rows(section, f"{prefix}{name}.")


def suggest(key: str, known: list[str]) -> str:
    """Return a hint in brackets: the most similar of the `known` keys, or all of them."""
    close = difflib.get_close_matches(key, known, n=1)
    return f"(did you mean `{close[0]}`?)" if close else f"(known: {', '.join(known)})"


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """Return the settings model of `field`, which may be optional; None if it is a single value."""
    kinds = get_args(field.annotation) or (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _explain(root: type[BaseModel], item: Any) -> str:
    """Return one problem as a sentence that begins with the setting's name."""
    path = [str(part) for part in item["loc"]]
    key = ".".join(path)
    if item["type"] != "extra_forbidden":
        message = str(item["msg"])
        return f"setting `{key}`: {message[0].lower()}{message[1:]}, got {_shown(item['input'])}"
    model: type[BaseModel] | None = root
    for part in path[:-1]:
        model = _section(model.model_fields[part]) if model is not None else None
    known = list(model.model_fields) if model is not None else []
    return f"unknown setting `{key}` {suggest(path[-1], known)}"
