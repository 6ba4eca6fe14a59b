"""A question, a tool for it, and what a model of Hermes' kind writes of it."""

from typing import Any

ASK = "How is it in Rome?"
MESSAGES: list[Any] = [{"role": "user", "content": ASK}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
THOUGHT = "<think>\nRome.\nHm.\n</think>\n\n"
