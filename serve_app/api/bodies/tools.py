"""The tools of a chat request and its `tool_choice`."""

import json
from typing import Annotated, Any, Literal, cast

from pydantic import Field, ValidationError

from serve_app.api.bodies import ignored
from serve_app.api.bodies.body import Body, refusal
from serve_app.errors import InvalidRequestError

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 2**18


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class FunctionDefinition(Body):
    """A function with the JSON schema of its arguments.

    `strict`: the arguments follow the schema. Those of required calls always do.
    """

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """One of `tools`."""

    ignores = ignored.TOOL

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Return the tool in the form of chat templates."""
        function: dict[str, Any] = {"name": self.function.name, "description": self.function.description or ""}
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": {**function, "parameters": parameters}}


class FunctionName(Body):
    """The name of a function in `tools`."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """A subset of `tools` that the model may call (`auto`) or must call (`required`)."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(Body):
    """OpenAI's `allowed_tools`."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice | None


def check_tool_choice(value: Any) -> ToolChoice:
    """Return a `tool_choice` of any of OpenAI's forms, or raise an error."""
    kind = value.get("type") if isinstance(value, dict) else value
    try:
        match kind:
            case None | "none" | "auto" | "required" if kind is value:
                return cast(ToolChoice, kind)
            case "function":
                return NamedTool.model_validate(value)
            case "allowed_tools":
                return AllowedToolsChoice.model_validate(value)
    except ValidationError:
        pass
    raise refusal(
        'must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
    )


def check_tools(tools: list[Tool] | None) -> list[Tool] | None:
    """Raise an error for too many or too large tools, or two tools with one name."""
    if not tools:
        return None
    if len(tools) > MAX_TOOLS:
        raise refusal(f"may contain at most {MAX_TOOLS} tools")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise refusal("must not contain two tools with the same name")
    written = json.dumps([tool.for_template() for tool in tools], ensure_ascii=False, separators=(",", ":"))
    if len(written.encode()) > MAX_TOOLS_BYTES:
        raise refusal(f"may have at most {MAX_TOOLS_BYTES} bytes of JSON")
    return tools


def allowed_names(tools: list[Tool] | None, choice: ToolChoice) -> tuple[list[str], bool]:
    """Return the names of the tools that may be called, and whether a call is required.

    Raises `InvalidRequestError` for unknown names.
    """
    names = [tool.function.name for tool in tools or ()]
    if choice == "none" or not names:
        return [], False
    if isinstance(choice, NamedTool):
        return [_known(choice.function.name, names, "tool_choice.function.name")], True
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        param = "tool_choice.allowed_tools.tools"
        wanted = {_known(tool.function.name, names, param) for tool in allowed.tools}
        return [name for name in names if name in wanted], allowed.mode == "required"
    return names, choice == "required"


def _known(name: str, names: list[str], param: str) -> str:
    if name not in names:
        raise InvalidRequestError(f"`{param}` names {name[:64]!r}, which is not in `tools`", param=param)
    return name
