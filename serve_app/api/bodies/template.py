"""Inputs of the chat template besides messages: tools and template variables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from serve_app.api.bodies.schemas import ChatBody
from serve_app.api.bodies.tools import FunctionDefinition, NamedTool, allowed_names
from serve_app.errors import InvalidRequestError
from serve_app.text.chat_template import without_tools
from serve_app.text.tokenizer import Tokenizer
from serve_app.text.tool_grammar import CallableTool, Calls

_THINKING_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class CallableTools:
    """The tools that an answer may call. `parameters`: JSON schemas by name."""

    calls: Calls
    parameters: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, body: ChatBody, tokenizer: Tokenizer) -> Self | None:
        """Return the callable tools; None if there are none. Raises `InvalidRequestError`."""
        names, required = allowed_names(body.tools, body.tool_choice)
        if not names:
            return None
        form = tokenizer.tool_format
        if form is None:
            raise without_tools("tools")
        functions = [(i, tool.function) for i, tool in enumerate(body.tools or ()) if tool.function.name in names]
        callable_tools = [
            CallableTool(
                function.name,
                _enforced(function) if required or function.strict else None,
                f"tools[{i}].function.parameters",
            )
            for i, function in functions
        ]
        once = isinstance(body.tool_choice, NamedTool)
        several = not once if body.parallel_tool_calls is None else body.parallel_tool_calls
        parameters = {function.name: function.parameters or {} for _, function in functions}
        return cls(Calls(form, callable_tools, required, several), parameters)


def _enforced(function: FunctionDefinition) -> dict[str, Any]:
    """Return the schema to enforce. A function without `parameters` takes an empty object."""
    schema = function.parameters or {"properties": {}, "additionalProperties": False}
    return {"type": "object", **schema}


def knows_effort(tokenizer: Tokenizer) -> bool:
    """Whether the chat template supports a reasoning effort."""
    return not tokenizer.template_variables.isdisjoint(("reasoning_effort", *_THINKING_SWITCHES))


def template_variables(body: ChatBody, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the template variables from `chat_template_kwargs` and `reasoning_effort`.

    Raises `InvalidRequestError` for variables that the template does not have.
    """
    if body.thinking_token_budget is not None and tokenizer.reasoning is None:
        raise InvalidRequestError(
            "`thinking_token_budget` limits reasoning, which this model's chat template does not support; leave it out",
            param="thinking_token_budget",
        )
    known = tokenizer.template_variables
    variables = dict(body.chat_template_kwargs or {})
    for name in [*variables]:
        if name in known:
            continue
        if name in _THINKING_SWITCHES and variables[name] is False and known.isdisjoint(_THINKING_SWITCHES):
            del variables[name]  # there is no thinking to switch off
        else:
            raise InvalidRequestError(
                f"`chat_template_kwargs.{name[:64]}` is not a variable of this model's chat template "
                f"(known: {', '.join(sorted(known)) or 'nothing'})",
                param=f"chat_template_kwargs.{name[:64]}",
            )
    effort = body.reasoning_effort
    switch = next((name for name in _THINKING_SWITCHES if name in known), None)
    if effort is not None and "reasoning_effort" in known:
        variables.setdefault("reasoning_effort", effort)
    elif effort is not None and switch is not None:
        variables.setdefault(switch, effort != "none")
    elif effort not in (None, "none"):
        raise InvalidRequestError(
            "`reasoning_effort` is not supported by this model's chat template; leave it out",
            param="reasoning_effort",
        )
    return variables
