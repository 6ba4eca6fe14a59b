"""Why a constraint is refused."""

from enum import StrEnum


class Refusal(StrEnum):
    """Why a constraint is refused, as an error's code."""

    TOO_LARGE = "grammar_too_large"
    INVALID = "grammar_invalid"
    """A regular expression or a grammar that is none."""
    UNSUPPORTED = "grammar_unsupported"
    """A JSON schema that cannot be enforced."""
    UNMATCHABLE = "grammar_unmatchable"
    """No text can match it, or finding one is too much work."""


class SchemaError(Exception):
    """A JSON schema cannot be enforced. path: of the part at fault."""

    def __init__(self, path: str, reason: str, code: Refusal = Refusal.UNSUPPORTED) -> None:
        super().__init__(reason)
        self.path, self.reason, self.code = path, reason, code
