"""Every error this project raises on purpose, and what each one means over HTTP.

    ServeAppError
    ├── ConfigError                 start-up refused: a setting, a path or weights are wrong
    └── RequestError                one request gets an error; the server continues
        ├── InvalidRequestError     400  the request itself is wrong
        │   └── ContextLengthError  400  it does not fit the model's context or the KV pool
        ├── AuthenticationError     401  no API key, or an unknown one
        ├── PermissionDeniedError   403  the key does not allow it
        ├── ModelNotFoundError      404  no such model
        ├── PayloadTooLargeError    413  body over the limit
        ├── UnsupportedMediaTypeError 415
        ├── RequestTimeoutError     408  the client was too slow, or a deadline passed
        ├── OverloadedError         429  the queue is full; retry after `retry_after_s`
        ├── UnavailableError        503  no replica can serve now; retry after `retry_after_s`
        └── EngineError             500  the engine failed this request

Domain code raises these; `serve_app.api.door.errors` maps them to responses, once. Requests cross
process borders, so a `RequestError` turns into a plain dict (`to_wire`) and back (`from_wire`)
instead of being pickled.
"""

from typing import Any, ClassVar


class ServeAppError(Exception):
    """Base of all deliberate errors."""


class ConfigError(ServeAppError):
    """The server cannot start as configured; the message, one line, names the setting or file."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class RequestError(ServeAppError):
    """One request failed. `message` is for the client: no paths, no traceback."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        # A client's text may contain lone surrogates, which a response cannot.
        self.message = message.encode(errors="backslashreplace").decode()
        super().__init__(self.message)
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s

    def to_wire(self) -> dict[str, Any]:
        """Return plain data from which `from_wire` makes an equal error."""
        return {
            "error": type(self).__name__,
            "message": self.message,
            "param": self.param,
            "code": self.code,
            "retry_after_s": self.retry_after_s,
        }


class InvalidRequestError(RequestError):
    """The request is malformed or impossible; `param` names the field."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """Prompt, or prompt plus requested output, does not fit."""

    default_code = "context_length_exceeded"


class AuthenticationError(RequestError):
    """The API key is missing, unknown or expired."""

    status = 401
    type = "invalid_request_error"
    default_code = "invalid_api_key"


class PermissionDeniedError(RequestError):
    """The API key lacks the permission, or the host name or origin is not allowed."""

    status = 403
    type = "permission_error"
    default_code = "permission_denied"


class ModelNotFoundError(RequestError):
    """The request's `model` is not served."""

    status = 404
    type = "invalid_request_error"
    default_code = "model_not_found"


class PayloadTooLargeError(RequestError):
    """The body is larger than the limit."""

    status = 413
    type = "invalid_request_error"
    default_code = "payload_too_large"


class UnsupportedMediaTypeError(RequestError):
    """The body is not plain JSON."""

    status = 415
    type = "invalid_request_error"
    default_code = "unsupported_media_type"


class RequestTimeoutError(RequestError):
    """The client sent too slowly, or the request's deadline passed."""

    status = 408
    type = "timeout_error"
    default_code = "request_timeout"
    retryable = True


class OverloadedError(RequestError):
    """The queue is full."""

    status = 429
    type = "rate_limit_error"
    default_code = "queue_full"
    retryable = True


class UnavailableError(RequestError):
    """No replica can serve now."""

    status = 503
    type = "server_error"
    default_code = "unavailable"
    retryable = True


class EngineError(RequestError):
    """The engine failed this request; with code `ENGINE_DIED`, all its requests."""

    default_code = "engine_error"


ENGINE_DIED = "engine_died"
"""The code of the `EngineError` for the requests of an engine that ended itself."""

KILLED_REPLICAS = "request_killed_replicas"
"""The code of the `EngineError` for a request that may have killed several replicas."""


_WIRE_TYPES: dict[str, type[RequestError]] = {
    cls.__name__: cls
    for cls in (
        InvalidRequestError,
        ContextLengthError,
        AuthenticationError,
        PermissionDeniedError,
        ModelNotFoundError,
        PayloadTooLargeError,
        UnsupportedMediaTypeError,
        RequestTimeoutError,
        OverloadedError,
        UnavailableError,
        EngineError,
    )
}


def from_wire(data: dict[str, Any]) -> RequestError:
    """Return the error that `RequestError.to_wire` described; `EngineError` for an unknown name."""
    cls = _WIRE_TYPES.get(data["error"], EngineError)
    return cls(data["message"], param=data["param"], code=data["code"], retry_after_s=data["retry_after_s"])


def one_line(error: BaseException, *, kind: bool = False) -> str:
    """Return the error's text in one line of at most 300 characters, or its name if it has no text.

    kind: put the class name in front.
    """
    name, text = type(error).__name__, " ".join(str(error).split())[:300]
    return (f"{name}: {text}" if kind else text) if text else name
