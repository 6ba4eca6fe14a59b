"""Grammars: what an output may be, as text; and the matchers that follow outputs through one.

A grammar travels as text in `SamplingParams.grammar` and nothing else does: a matcher's state is a function of that
text and the output tokens, so whoever has both can make it again (a fork, a preempted request, another replica).

The work is llguidance's (Earley parser over a lexer of regex derivatives, masks on demand), chosen because its work is
bounded whatever the grammar, and because it refuses what it cannot enforce instead of ignoring it.
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
