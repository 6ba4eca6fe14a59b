"""Random JSON schemas for hypothesis: small ones whose every text ends, and any of what users
write."""

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]
NAMES = ("a", "name", "x y", "größe", "名前", 'q"uote', "back\\slash", "$ref", "a/b~c", "🍎")
_PATTERNS = ("^[a-z]{2,4}$", "[0-9]+", "^(red|green)-\\d{2}$", "^é{1,3}$", "^$", "a.c", "^\\w+@\\w+\\.(com|org)$")
_FORMATS = (
    *("date-time", "date", "time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname"),
    *("path", "password", "binary", "byte", "decimal"),
)


def _numbers(kind: str) -> st.SearchStrategy[Schema]:
    limits = {
        "minimum": (-9, 0.5, -(2**63), 2**53 + 1),
        "maximum": (99, 1e19, 2**63 - 1),
        "exclusiveMinimum": (-5, 0),
        "exclusiveMaximum": (50, 0.5),
        "multipleOf": (3, 1000),
    }
    optional: Any = {name: st.sampled_from(limit) for name, limit in limits.items()}
    return st.fixed_dictionaries({"type": st.just(kind)}, optional=optional)


def _bounded_leaves() -> st.SearchStrategy[Schema]:
    return st.one_of(
        st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 5)),
        st.builds(
            lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
            st.integers(-9, 9),
            st.integers(0, 99),
        ),
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.lists(st.sampled_from(["a", "bb", 'c"c', 7, True, None]), min_size=1, max_size=3, unique_by=repr).map(
            lambda values: {"enum": values}
        ),
    )


def bounded_schemas(depth: int = 2) -> st.SearchStrategy[Schema]:
    """Bounded in depth, lengths and items: every output ends."""
    leaves = _bounded_leaves()
    if not depth:
        return leaves
    inner = bounded_schemas(depth - 1)
    objects = st.dictionaries(st.sampled_from(["a", "name", "x y"]), inner, max_size=3).map(
        lambda p: {"type": "object", "properties": p, "required": list(p), "additionalProperties": False}
    )
    arrays = st.builds(lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers(0, 2))
    unions = st.lists(leaves, min_size=2, max_size=3).map(lambda parts: {"anyOf": parts})
    return st.one_of(leaves, objects, arrays, unions)


def instances(schema: Schema) -> st.SearchStrategy[Any]:
    """What a schema of `bounded_schemas` accepts, properties in its order."""
    match schema:
        case {"enum": values}:
            return st.sampled_from(values)
        case {"anyOf": parts}:
            return st.one_of(list(map(instances, parts)))
        case {"properties": properties}:
            values = st.tuples(*map(instances, properties.values()))
            return values.map(lambda values: dict(zip(properties, values, strict=True)))
        case {"items": part, "maxItems": most}:
            return st.lists(instances(part), max_size=most)
        case {"maxLength": most}:
            return st.text(max_size=most)
        case {"minimum": low, "maximum": high}:
            return st.integers(low, high)
    return st.booleans() if schema == {"type": "boolean"} else st.none()


def _leaves() -> st.SearchStrategy[Schema]:
    texts = st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={
            "minLength": st.integers(0, 3),
            "maxLength": st.integers(3, 9),
            "pattern": st.sampled_from(_PATTERNS),
            "format": st.sampled_from(_FORMATS),
        },
    )
    constants = st.sampled_from([0, 1.5, 2**53 + 1, -(2**63), True, None, "é\n", [], {"a": [1]}, {}])
    return st.one_of(
        texts,
        _numbers("integer"),
        _numbers("number"),
        constants.map(lambda value: {"const": value}),
        st.lists(constants, min_size=1, max_size=4).map(lambda values: {"enum": values}),
        st.sampled_from([{}, {"type": ["string", "null"]}, {"type": ["integer", "boolean"]}, {"not": {}}]),
        st.sampled_from([{"$ref": "#/$defs/part"}, {"$ref": "#"}]),
    )


def _nodes(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    named = st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": named},
        optional={
            "required": st.lists(st.sampled_from(NAMES), max_size=3, unique=True),
            "additionalProperties": st.one_of(st.booleans(), inner),
            "patternProperties": st.dictionaries(
                st.sampled_from(["^x-[a-z]+$", "^a$", "^(a|name)$", "^.*$", "^b"]), inner, min_size=1, max_size=2
            ),
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(1, 3),
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(0, 3),
            "uniqueItems": st.booleans(),
        },
    )
    mixed = st.sampled_from(["anyOf", "oneOf", "allOf"])
    unions = st.builds(lambda kind, parts: {kind: parts}, mixed, st.lists(inner, min_size=1, max_size=3))
    return st.one_of(objects, arrays, unions, st.tuples(objects, unions).map(lambda both: {**both[0], **both[1]}))


def schemas() -> st.SearchStrategy[Schema]:
    """Any keyword in any mixture, references in circles too: what of it cannot be enforced must be
    refused."""
    inner = st.recursive(_leaves(), _nodes, max_leaves=6)
    return st.builds(lambda whole, part: {**whole, "$defs": {"part": part}}, inner, inner)
