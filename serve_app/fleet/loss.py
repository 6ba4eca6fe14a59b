"""The ways in which an attempt can be lost while its request lives on."""

from enum import StrEnum


class LossReason(StrEnum):
    """Why an attempt was lost."""

    UNAVAILABLE = "unavailable"
    """The connection broke or could not be made: what the death of a process looks like."""
    ENGINE_DIED = "engine_died"
    """The replica's engine ended with an error."""
    STALLED = "stalled"
    """The replica was silent, or its engine's step did not end."""
    REFUSED = "refused"
    """The replica took no request: it is ending, or there was no link to send it by. The request did not kill it."""
    INCOMPATIBLE = "incompatible"
    """The replica speaks another version of the link, does not know its key, or describes itself in unknown words."""
    LEFT = "left"
    """The replica is being stopped: scale-down, update, or Ray found it unhealthy."""
    QUARANTINE = "quarantine"
    """The replica was reserved for a request in quarantine."""
    UNREAD = "unread"
    """Its reader was so far behind that there was no more room for its outputs; it goes on from there."""
    CUT = "cut"
    """Part of the stream was missing."""
    UNROUTED = "unrouted"
    """No replica could have taken it."""

    @property
    def is_death(self) -> bool:
        """Whether the replica ended, or might as well have, and the request may be why."""
        return self in (LossReason.UNAVAILABLE, LossReason.ENGINE_DIED, LossReason.STALLED)

    @property
    def is_planned(self) -> bool:
        """Whether the attempt was moved on purpose."""
        return self in (LossReason.LEFT, LossReason.QUARANTINE, LossReason.UNREAD)

    @property
    def is_suspicious(self) -> bool:
        """Whether the replica should get no requests until it gives a sign of life."""
        return self.is_death or self in (LossReason.REFUSED, LossReason.INCOMPATIBLE)


class ReplicaLostError(Exception):
    """The attempt is over, its request is not."""

    def __init__(self, reason: LossReason) -> None:
        super().__init__(reason.value)
        self.reason = reason
