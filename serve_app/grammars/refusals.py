"""Reasons for refusing a constraint."""

from enum import StrEnum


class Refusal(StrEnum):
    """Why a constraint is refused; the error's code."""

    TOO_LARGE = "grammar_too_large"
    INVALID = "grammar_invalid"
    """Not a valid regular expression or grammar."""
    UNSUPPORTED = "grammar_unsupported"
    """A JSON schema that cannot be enforced."""
    UNMATCHABLE = "grammar_unmatchable"
    """No text can match, or finding one takes too much work."""


class SchemaError(Exception):
    """A JSON schema cannot be enforced. path: location of the part that causes it."""

    def __init__(self, path: str, reason: str, code: Refusal = Refusal.UNSUPPORTED) -> None:
        super().__init__(reason)
        self.path, self.reason, self.code = path, reason, code
