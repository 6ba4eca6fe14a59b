"""Rewrites numeric keywords of JSON schemas so that llguidance enforces them exactly.

llguidance reads bounds as doubles, truncates those of integers to 64 bits, and multiplies factors
in 32 bits.
"""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

_MAX_INT64 = 2**63 - 1
_LEAST_INT64 = -(2**63 - 1024)
"""The least 64-bit bound that works: -2**63 overflows in llguidance, and no double is in between.
"""
_MOST = 9e18
"""Largest bound of numbers: llguidance converts their integer part to 64 bits."""
_LONG = 10**18
"""From this bound on, llguidance requires a bound on the other side too."""
_MAX_FACTOR = 1_000_000
_MAX_DECIMALS = 9
MAX_STATES = 5_000
"""Maximum of a `multipleOf` after division by its factors 2 and 5; its automaton has that many
states. With 9,999 (not with 7,001) llguidance fails in the middle of a number that also has bounds.
"""
_LEAST_ABOVE_ZERO = 1e-15
_READ_DIGITS = 15
"""Digits of a fraction that llguidance's JSON reader reads exactly."""


class NumberError(Exception):
    """A number cannot be enforced. The message names the keyword and the limit."""


def exact_constant(value: Any) -> None:
    """Check the numbers of a `const`: llguidance writes each as the nearest double."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
        elif isinstance(part, int | float) and not isinstance(part, bool):
            number = _finite("const", part)
            if isinstance(part, float) and _num_digits(part) > _READ_DIGITS:
                raise NumberError(f"the constant {short(part)} has more than {_READ_DIGITS} digits")
            if number.is_integer() and not _LEAST_INT64 <= part <= _MAX_INT64:
                raise NumberError(f"the constant {short(part)} has more than 64 bits")
            if isinstance(part, int) and Decimal(repr(number)) != part and part != _MAX_INT64:
                raise NumberError(f"the constant {short(part)} cannot be written exactly (limit: 2**53)")


def exact_numbers(schema: dict[str, Any]) -> tuple[int, int] | None:
    """Rewrite the numeric keywords of one schema in place.

    Returns its `multipleOf` as (coefficient, exponent), meaning coefficient / 10**exponent; None
    without one. Raises `NumberError`.
    """
    kinds = schema.get("type", "number")
    kinds = {kinds} if isinstance(kinds, str) else {*kinds}
    keys = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    values = {key: schema[key] for key in keys if key in schema}
    factor = _factor(schema)
    if not values:
        return factor
    low = _bound(values, "minimum", "exclusiveMinimum", max)
    high = _bound(values, "maximum", "exclusiveMaximum", min)
    for key in values:
        del schema[key]
    if kinds & {"integer", "number"}:
        integers = "number" not in kinds
        if factor is not None:
            _check_multiple(factor, low, high, integers=integers)
        (_write_integers if integers else _write_numbers)(schema, low, high)
    return factor


Bound = tuple[Fraction, bool] | None
"""A bound, and whether it is exclusive."""


def _bound(values: dict[str, Any], closed: str, open_: str, tighter: Any) -> Bound:
    found: list[tuple[Fraction, bool]] = []
    exclusive = values.get(open_, False)
    if isinstance(values.get(closed), bool):
        raise NumberError(f"`{closed}` must be a number")
    if closed in values:
        _finite(closed, values[closed])
        found.append((Fraction(values[closed]), exclusive is True))
    if not isinstance(exclusive, bool):
        _finite(open_, exclusive)
        found.append((Fraction(exclusive), True))
    if not found:
        return None
    best = tighter(value for value, _ in found)
    return best, any(is_open for value, is_open in found if value == best)


def _write_integers(schema: dict[str, Any], low: Bound, high: Bound) -> None:
    least = most = None
    if low is not None:
        least = math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
        least = _LEAST_INT64 if least <= -(2**63) else least  # excludes 1,024 numbers
    if high is not None:
        most = math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
        most = min(most, _MAX_INT64)
    if least is not None and most is not None and least > most:
        raise NumberError(f"no integer lies between `minimum` and `maximum`: {short(least)} is above {short(most)}")
    for bound in (least, most):
        if bound is not None and bound != _MAX_INT64 and int(float(bound)) != bound:
            raise NumberError(f"the bound {short(bound)} cannot be kept exactly (limit: 2**53)")
        if bound is not None and not _LEAST_INT64 <= bound <= _MAX_INT64:
            raise NumberError(f"the bound {short(bound)} has more than 64 bits")
    if least is not None and least >= _LONG and most is None:
        most = _MAX_INT64
    if most is not None and most <= -_LONG and least is None:
        least = _LEAST_INT64
    schema |= {key: bound for key, bound in (("minimum", least), ("maximum", most)) if bound is not None}


def _write_numbers(schema: dict[str, Any], low: Bound, high: Bound) -> None:
    least, above = _double(low, up=True)
    most, below = _double(high, up=False)
    if least is not None and most is not None and (least > most or (least == most and (above or below))):
        raise NumberError("no number lies between `minimum` and `maximum`")
    if (least is not None and least > _MOST) or (most is not None and most < -_MOST):
        raise NumberError("a bound has more than 64 bits")
    # Numbers with only the other bound get `_MOST` as a bound too.
    if most is None and least is not None and least >= _LONG or (most is not None and most > _MOST):
        most, below = _MOST, False
    if least is None and most is not None and most <= -_LONG or (least is not None and least < -_MOST):
        least, above = -_MOST, False
    if least is not None and most is not None:
        # In a range within one integer part, llguidance would include an exclusive bound next to 0.
        if above and least >= 0 and math.floor(least) == math.floor(most):
            least, above = _next(least, most), False
        if below and most <= 0 and math.floor(-least) == math.floor(-most):
            most, below = -_next(-most, -least), False
    if least is not None:
        schema["exclusiveMinimum" if above else "minimum"] = _readable(least, math.inf)
    if most is not None:
        schema["exclusiveMaximum" if below else "maximum"] = _readable(most, -math.inf)


def _next(end: float, other: float) -> float:
    """Return the least number above `end` that can be written.

    Above 0, it is one without hundreds of zeros.
    """
    following = math.nextafter(end, math.inf)
    if following < _LEAST_ABOVE_ZERO < other:
        return _LEAST_ABOVE_ZERO
    if following < 1e-100:
        raise NumberError("the range of numbers is too narrow next to 0")
    return following


def _readable(number: float, inward: float) -> float:
    """Return a bound that llguidance reads exactly, or one slightly inside.

    Its reader is slightly off at 16 digits.
    """
    if number.is_integer() and abs(number) < 2**63:
        return int(number)
    if _num_digits(number) > _READ_DIGITS:
        for _ in range(3):
            number = math.nextafter(number, inward)
    return number


def _num_digits(number: float) -> int:
    return len(Decimal(repr(number)).as_tuple().digits)


def _double(bound: Bound, *, up: bool) -> tuple[float | None, bool]:
    """Return a bound as (double, exclusive) that excludes at least the same numbers."""
    if bound is None:
        return None, False
    value, is_open = bound
    number = float(value)
    if Fraction(number) == value and is_open and number:
        # llguidance would read a text just beyond the bound as the bound itself.
        return math.nextafter(number, math.inf if up else -math.inf), False
    if Fraction(number) == value:
        return number + 0.0, is_open
    if (Fraction(number) < value) == up:
        number = math.nextafter(number, math.inf if up else -math.inf)
    return number + 0.0, False


def _factor(schema: dict[str, Any]) -> tuple[int, int] | None:
    factor = schema.get("multipleOf")
    if factor is None:
        return None
    number, exponent = _finite("multipleOf", factor), 0
    if number <= 0:
        raise NumberError("`multipleOf` must be larger than 0")
    while number % 1:  # llguidance computes it the same way
        number, exponent = number * 10, exponent + 1
    if (
        number > _MAX_FACTOR
        or exponent > _MAX_DECIMALS
        or Decimal(int(number)).scaleb(-exponent) != Decimal(str(factor))
    ):
        raise NumberError(
            f"`multipleOf` {short(factor)} has too many digits: without its decimal point it must be at most "
            f"{_MAX_FACTOR}, with at most {_MAX_DECIMALS} decimals"
        )
    if num_states(int(number)) > MAX_STATES:
        raise NumberError(f"`multipleOf` {short(factor)} must be at most {MAX_STATES} without its factors 2 and 5")
    return int(number), exponent


def num_states(coefficient: int) -> int:
    """Return the number of states of a `multipleOf` automaton.

    It is `coefficient` without its factors 2 and 5.
    """
    for prime in (2, 5):
        while coefficient % prime == 0:
            coefficient //= prime
    return coefficient


def _check_multiple(factor: tuple[int, int], low: Bound, high: Bound, *, integers: bool) -> None:
    """Raise `NumberError` if a range contains no multiple. Exact arithmetic."""
    if low is None or high is None:
        return
    step = Fraction(factor[0], 10 ** factor[1])
    step = Fraction(step.numerator) if integers else step
    first = math.floor(low[0] / step) + 1 if low[1] else math.ceil(low[0] / step)
    last = math.ceil(high[0] / step) - 1 if high[1] else math.floor(high[0] / step)
    if first > last:
        raise NumberError("no multiple of `multipleOf` lies between `minimum` and `maximum`")


def _finite(key: str, value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise NumberError(f"`{key}` is too large (maximum 1.8e308)")
    return number


def short(value: float) -> str:
    """Format a number for an error message, in at most 48 characters."""
    text = repr(value) if abs(value) < 10**40 else f"{Decimal(value):.6e}"
    return text[:48]
