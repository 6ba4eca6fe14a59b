"""Queue length at the ingress of each application, stored by its policy for the engine's policy.

This state is in Ray Serve's controller, which runs both policies, one after the other.
"""

_lengths: dict[str, float] = {}


def note(application: str, length: float) -> None:
    """Store the queue length of `application`."""
    _lengths[application] = length


def length(application: str) -> float:
    """Return the stored queue length, 0 if there is none."""
    return _lengths.get(application, 0.0)
