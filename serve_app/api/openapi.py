"""Builds GET /openapi.json.

Adds what FastAPI cannot detect, since our own code parses bodies and refuses requests.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from serve_app.api.bodies.body import Body
from serve_app.api.door.errors import is_anthropic
from serve_app.errors import RequestError

_REF = "#/components/schemas/{model}"
_OF_BODIES = (413, 415)
"""Statuses of requests with a body only."""
_REFUSALS: Mapping[int, str] = {
    **{kind.status: (kind.__doc__ or "").partition("\n")[0] for kind in RequestError.__subclasses__()},
    431: "The headers are too large.",
    502: "The server ended without an answer.",
    504: "The server gave no answer in time.",
}
_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


_ERRORS = {
    "Error": _object(
        error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL, request_id=_TEXT)
    ),
    "AnthropicError": _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT), request_id=_TEXT),
}
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


class DocumentedApi(FastAPI):
    """A FastAPI application that documents the bodies its routes parse."""

    def __init__(self, **options: Any) -> None:
        """Without documentation pages: FastAPI's load their scripts from a CDN."""
        super().__init__(**options, docs_url=None, redoc_url=None, generate_unique_id_function=lambda route: route.name)
        self._bodies: list[type[Body]] = []

    def accepts(self, body: type[Body], example: Mapping[str, Any], *, streams: bool = False) -> dict[str, Any]:
        """Return `openapi_extra` for a route that parses `body`.

        streams: the answer may be events.
        """
        self._bodies.append(body)
        content = {"schema": {"$ref": _REF.format(model=body.__name__)}, "example": example}
        operation: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": content}}}
        if streams:
            answers = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}
            operation["responses"] = {"200": {"content": answers}}
        return operation

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, built at the first call."""
        if self.openapi_schema is None:
            self.openapi_schema = self._completed(super().openapi())
        return self.openapi_schema

    def _completed(self, document: dict[str, Any]) -> dict[str, Any]:
        _, definitions = models_json_schema([(body, "validation") for body in self._bodies], ref_template=_REF)
        schemas = {**definitions.get("$defs", {}), **_ERRORS}
        document["components"] = {"schemas": schemas, "securitySchemes": _KEYS}
        document["security"] = [{}, *({name: []} for name in _KEYS)]  # a keys file is optional
        for path, operations in document["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # FastAPI's own; `_refusals` has ours
                operation["responses"] |= _refusals(path, with_body="requestBody" in operation)
        return document


def _refusals(path: str, *, with_body: bool) -> dict[str, Any]:
    """Return the error responses of `path`, by status."""
    schema = {"$ref": _REF.format(model="AnthropicError" if is_anthropic(path) else "Error")}
    content = {"application/json": {"schema": schema}}
    retry = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds; an estimate."}}
    return {
        str(status): {"description": description, "content": content}
        | ({"headers": retry} if status in (429, 503) else {})
        for status, description in sorted(_REFUSALS.items())
        if with_body or status not in _OF_BODIES
    }
