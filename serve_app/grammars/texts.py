"""Builds grammars from clients' constraints, and refuses constraints before generation."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from serve_app.core.sampling_params import MAX_GRAMMAR_CHARS
from serve_app.errors import InvalidRequestError
from serve_app.grammars import library, schemas
from serve_app.grammars.library import GrammarError
from serve_app.grammars.probes import Probes
from serve_app.grammars.recent import Recent
from serve_app.grammars.refusals import Refusal, SchemaError
from serve_app.grammars.walk import dead_end

MAX_CHOICES = 10_000
MAX_RULE_CHARS = 32_768
"""Maximum length of Lark rules: the work for one terminal grows with the square of its parts."""
_MAX_LOCATE_CHARS = 2**18
"""Maximum characters of grammars built to find the faulty part of a refused schema."""
_MIN_LOCATE_CHARS = 2**10
"""Each of these grammars counts as at least this many characters."""
_LOCATE_MASKS = 64
"""Masks per walk of these grammars."""
_EMBEDDED = re.compile(r"%json\b\s*")
_known: Recent[str] = Recent(256, 2**22)
"""Grammars by source, since agents send the same ones with every request."""


def json_schema(schema: Mapping[str, Any] | str, *, param: str = "response_format") -> str:
    """Return the grammar of JSON texts that `schema` (an object or its text) accepts.

    Raises `InvalidRequestError` naming keyword and path if it cannot be enforced.
    """
    parsed = schemas.parse(schema) if isinstance(schema, str) else schema
    if parsed is None:
        raise InvalidRequestError(
            f"`{param}` must be a JSON object, or the text of one", param=param, code=Refusal.INVALID
        )
    try:
        schemas.check_depth(parsed)
        key = _key(parsed)
        _check_size(key)
        known = _known.get(key)
        if known is None:
            known = library.on_deep_stack(lambda: _schema_grammar(parsed))
            _known.put(key, known)
        return known
    except SchemaError as error:
        where = f" at {error.path}" if error.path else ""
        raise InvalidRequestError(
            f"`{param}`: this JSON schema cannot be enforced{where}: {error.reason}",
            param=param,
            code=error.code,
        ) from None


def json_object(*, param: str = "response_format") -> str:
    """Return the grammar of JSON objects."""
    return json_schema({"type": "object"}, param=param)


def regex(pattern: str, *, param: str = "structured_outputs") -> str:
    """Return the grammar of texts that `pattern` matches as a whole (Rust's regex syntax)."""
    return _walked("regex", pattern, library.from_regex, param)


def lark(grammar: str, *, param: str = "structured_outputs") -> str:
    """Return the grammar of rules in llguidance's Lark dialect."""
    if len(grammar) > MAX_RULE_CHARS:
        raise _refused(f"it has {len(grammar)} characters; the limit is {MAX_RULE_CHARS}", param, Refusal.TOO_LARGE)
    return _walked("lark", grammar, lambda rules: library.from_lark(_with_schemas(rules)), param)


def choice(answers: Sequence[str], *, param: str = "structured_outputs") -> str:
    """Return the grammar of exactly these texts."""
    if not answers or len(answers) > MAX_CHOICES or not all(answers):
        raise InvalidRequestError(
            f"`{param}` must contain 1 to {MAX_CHOICES} non-empty texts",
            param=param,
            code=Refusal.TOO_LARGE if answers else Refusal.UNMATCHABLE,
        )
    alternatives = " | ".join(json.dumps(answer, ensure_ascii=False) for answer in dict.fromkeys(answers))
    return _walked("choice", f"start: {alternatives}", library.from_lark, param)


def compose(rules: str, parts: Mapping[str, str], *, param: str) -> str:
    """Return one grammar from Lark `rules`.

    They refer to `parts` (grammars of this module) as `@name`.
    """
    grammars: list[dict[str, Any]] = [{"name": "main", "lark_grammar": rules}]
    for name, text in parts.items():
        part = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
        grammars.append({**part, "name": name})
    return _checked(lambda: json.dumps({"grammars": grammars}, ensure_ascii=False), param)


def _schema_grammar(schema: Mapping[str, Any]) -> str:
    written = schemas.prepared(schema, Probes().can_name_more)
    try:
        text = library.from_schema(written)
    except GrammarError as error:
        raise SchemaError("", str(error), Refusal.INVALID) from None
    _check_size(text)
    if (refused := _reason(text)) is not None:
        raise SchemaError(*_locate(written, refused, _reason))
    if (stop := dead_end(text)) is not None:
        raise SchemaError(*_locate(written, stop, partial(dead_end, max_masks=_LOCATE_MASKS)), Refusal.UNMATCHABLE)
    return text


def _key(schema: Mapping[str, Any]) -> str:
    try:
        return repr(schema)
    except ValueError as error:  # an integer with more digits than Python converts
        raise SchemaError("", str(error).partition(";")[0], Refusal.INVALID) from None


def _check_size(text: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        reason = f"it has {len(text)} characters; the limit is {MAX_GRAMMAR_CHARS}"
        raise SchemaError("", reason, Refusal.TOO_LARGE)


def _with_schemas(rules: str) -> str:
    """Rewrite the JSON schemas in Lark rules as `schemas.prepared` does."""
    pieces, end, probes = [], 0, Probes()
    for found in _EMBEDDED.finditer(rules):
        if found.start() < end:
            continue
        try:
            schema, stop = json.JSONDecoder().raw_decode(rules, found.end())
            written = schemas.prepared(schema, probes.can_name_more)
        except (SchemaError, ValueError, RecursionError) as error:
            raise GrammarError(f"`%json` must be followed by a JSON schema that can be enforced: {error}") from None
        pieces += [rules[end : found.start()], f"%json {json.dumps(written)}"]
        end = stop
    return "".join([*pieces, rules[end:]])


def _reason(text: str) -> str | None:
    """Return why a grammar is refused; None if it is valid."""
    try:
        library.check(text)
    except GrammarError as error:
        return str(error)
    return None


def _checked(build: Callable[[], str], param: str) -> str:
    try:
        text = build()
        if len(text) > MAX_GRAMMAR_CHARS:
            reason = f"it has {len(text)} characters; the limit is {MAX_GRAMMAR_CHARS}"
            raise _refused(reason, param, Refusal.TOO_LARGE)
        library.check(text)
    except GrammarError as error:
        raise _refused(str(error), param, Refusal.INVALID) from None
    return text


def _walked(kind: str, source: str, write: Callable[[str], str], param: str) -> str:
    """Return `write(source)`, checked and walked. Cached by kind and source."""

    def build_and_walk() -> str:
        text = _checked(lambda: write(source), param)
        if (reason := dead_end(text)) is not None:
            raise _refused(reason, param, Refusal.UNMATCHABLE)
        return text

    known = _known.get(key := f"{kind} {source}")
    if known is None:
        known = library.on_deep_stack(build_and_walk)
        _known.put(key, known)
    return known


def _refused(reason: str, param: str, code: Refusal) -> InvalidRequestError:
    return InvalidRequestError(f"`{param}`: this grammar cannot be enforced: {reason}", param=param, code=code)


def _locate(schema: Mapping[str, Any], reason: str, check: Callable[[str], str | None]) -> tuple[str, str]:
    """Return (path, reason) of the innermost part of a refused schema that is refused by itself."""
    path, part, chars = "", schema, 0
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    while True:
        for step, child in schemas.parts(part):
            text = library.from_schema({**shared, **child})
            chars += max(len(text), _MIN_LOCATE_CHARS)
            if chars > _MAX_LOCATE_CHARS:
                return path, reason
            found = check(text)
            if found is not None:
                path, part, reason = f"{path}/{step}", child, found
                break
        else:
            return path, reason
