"""Reasons for losing an attempt whose request continues."""

from enum import StrEnum


class LossReason(StrEnum):
    """Why an attempt was lost."""

    UNAVAILABLE = "unavailable"
    """The connection broke or failed, as when a process dies."""
    ENGINE_DIED = "engine_died"
    """The replica's engine ended with an error."""
    STALLED = "stalled"
    """The replica was silent, or its engine's step did not end."""
    REFUSED = "refused"
    """The replica took no request: it is ending, or had no link. The request did not kill it."""
    INCOMPATIBLE = "incompatible"
    """The replica has another version of the link, another key, or malformed metadata."""
    LEFT = "left"
    """The replica is being stopped: scale-down, update, or Ray found it unhealthy."""
    QUARANTINE = "quarantine"
    """The replica was reserved for a request in quarantine."""
    UNREAD = "unread"
    """The reader was too far behind to buffer more outputs. The request continues from there."""
    CUT = "cut"
    """Part of the stream was missing."""
    UNROUTED = "unrouted"
    """No replica could take the attempt."""

    @property
    def is_death(self) -> bool:
        """Whether the replica died or must be treated as dead, possibly because of the request."""
        return self in (LossReason.UNAVAILABLE, LossReason.ENGINE_DIED, LossReason.STALLED)

    @property
    def is_planned(self) -> bool:
        """Whether the attempt was moved on purpose."""
        return self in (LossReason.LEFT, LossReason.QUARANTINE, LossReason.UNREAD)

    @property
    def is_suspicious(self) -> bool:
        """Whether the replica should get no requests until its next heartbeat."""
        return self.is_death or self in (LossReason.REFUSED, LossReason.INCOMPATIBLE)


class ReplicaLostError(Exception):
    """The attempt has ended, but its request has not."""

    def __init__(self, reason: LossReason) -> None:
        super().__init__(reason.value)
        self.reason = reason
