"""Doubling a number of rows or tokens while the machine's steps stay within limits.

Pure: it measures nothing itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

_TRIES = 5
_CERTAIN = 2.0
"""A step this many times over the limit is not measured again, since disturbances are rarely that large."""


@dataclass(frozen=True, slots=True)
class Objection:
    """What speaks against a number, and how many times longer than borne its step is."""

    reason: str
    excess: float


def double(number: int, most: int, objection: Callable[[int, int], Objection | None]) -> tuple[int, str | None]:
    """The largest of `number`, twice that and so on up to `most` to which there is no objection, and the reason of the
    objection to more; None at `most`.

    objection: by the steps of both numbers, measured now, what keeps the first from becoming the second. Once is not
    enough: a machine that is disturbed makes steps longer than they are, never shorter.
    """
    while number < most:
        more = min(2 * number, most)
        for _ in range(_TRIES):
            found = objection(number, more)
            if found is None or found.excess >= _CERTAIN:
                break
        if found is not None:
            return number, found.reason
        number = more
    return number, None
