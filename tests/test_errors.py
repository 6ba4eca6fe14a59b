import json

import pytest

from serve_app import errors
from serve_app.errors import EngineError, RequestError, from_wire, one_line


def subclasses(cls: type[RequestError]) -> list[type[RequestError]]:
    return [cls, *(deeper for child in cls.__subclasses__() for deeper in subclasses(child))]


REQUEST_ERRORS = [
    cls for cls in subclasses(RequestError) if cls.__module__ == errors.__name__ and cls is not RequestError
]


@pytest.mark.parametrize("cls", REQUEST_ERRORS)
def test_every_request_error_survives_the_wire(cls: type[RequestError]) -> None:
    error = cls("what happened", param="field", retry_after_s=1.5)
    back = from_wire(json.loads(json.dumps(error.to_wire())))
    assert type(back) is cls
    assert vars(back) == vars(error)
    assert str(back) == "what happened"
    assert back.code == cls.default_code


def test_a_code_of_its_own_survives_too() -> None:
    assert from_wire(EngineError("x", code="special").to_wire()).code == "special"


def test_an_unknown_name_is_an_engine_error() -> None:
    assert type(from_wire(EngineError("x").to_wire() | {"error": "FromTheFuture"})) is EngineError


@pytest.mark.parametrize("cls", REQUEST_ERRORS)
def test_the_docstring_draws_every_error_with_its_status(cls: type[RequestError]) -> None:
    line = next(line for line in str(errors.__doc__).splitlines() if f"─ {cls.__name__} " in line)
    assert f" {cls.status}" in line


def test_an_error_is_one_line() -> None:
    assert one_line(ValueError("first\n  second")) == "first second"
    assert one_line(ValueError("first"), kind=True) == "ValueError: first"
    assert one_line(ValueError("\n")) == one_line(ValueError(), kind=True) == "ValueError"
    assert one_line(ValueError("x" * 1000)) == "x" * 300
