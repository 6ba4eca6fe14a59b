"""Hermes' tool format for chat templates without tools.

Tools become a system message; calls and results become text.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from serve_app.text.tool_format import HERMES

_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def as_text(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert a conversation for templates with only system, user and assistant text messages."""
    plain: list[dict[str, Any]] = []
    if tools:
        prompt = _PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        first = messages[0] if messages and messages[0]["role"] == "system" else None
        messages = messages if first is None else messages[1:]
        plain.append({"role": "system", "content": prompt if first is None else f"{first['content']}\n\n{prompt}"})
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if i and messages[i - 1]["role"] == "tool":
                plain[-1]["content"] += f"\n{result}"
            else:
                plain.append({"role": "user", "content": result})
        elif calls := message.get("tool_calls"):
            texts = [message["content"], *_written(calls)]
            plain.append({"role": "assistant", "content": "\n".join(text for text in texts if text)})
        else:
            plain.append(message)
    return plain


def _written(calls: Iterable[dict[str, Any]]) -> Iterable[str]:
    for call in calls:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        yield f"{HERMES.begin}{call['function']['name']}{HERMES.middle}{arguments}{HERMES.end}"
