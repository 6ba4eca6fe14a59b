"""How many sequences wait at the ingress of each application, from the ingress's autoscaling policy for the engine's.

Lives in Ray Serve's controller, where both policies run, one after the other.
"""

_lengths: dict[str, float] = {}


def note(application: str, length: float) -> None:
    """The queue of `application` is `length` long now."""
    _lengths[application] = length


def length(application: str) -> float:
    """What was noted last (0: nothing yet)."""
    return _lengths.get(application, 0.0)
