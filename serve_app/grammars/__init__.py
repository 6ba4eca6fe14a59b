"""Grammars, as text, that constrain outputs, and matchers that apply them to outputs.

Only the text is sent to engines, in `SamplingParams.grammar`. A matcher's state is a function of
that text and the output tokens. So it can be rebuilt for a fork, a preempted request, or on another
replica.

llguidance does the work (Earley parser over a lexer of regex derivatives, masks on demand). It was
chosen because its work is bounded for any grammar, and because it refuses what it cannot enforce
instead of ignoring it.
"""

from serve_app.grammars.matchers import BudgetedMatcher, Grammars, Matcher, check_has_end
from serve_app.grammars.refusals import Refusal
from serve_app.grammars.texts import choice, compose, json_object, json_schema, lark, regex

__all__ = [
    "BudgetedMatcher",
    "Grammars",
    "Matcher",
    "Refusal",
    "check_has_end",
    "choice",
    "compose",
    "json_object",
    "json_schema",
    "lark",
    "regex",
]
