"""A tool call, its execution, and the answer with its result."""

import json
import os
from typing import Any

from openai import OpenAI

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "temperature",
            "description": "The temperature in a city, in degrees Celsius.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def temperature(city: str) -> int:
    """What the tool returns."""
    return {"Rome": 24, "Oslo": 3}[city]


client = OpenAI(base_url=os.environ.get("SERVE_APP_URL", "http://127.0.0.1:8000") + "/v1", api_key="unused")
model = client.models.list().data[0].id
messages: list[Any] = [{"role": "user", "content": "How warm is it in Rome?"}]

# `required`: the answer is a call, and its arguments follow the schema.
answer = client.chat.completions.create(
    model=model, messages=messages, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=256
)
messages.append(answer.choices[0].message)
for call in answer.choices[0].message.tool_calls or ():
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    print(f"{call.function.name}({arguments})")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(temperature(**arguments))})

answer = client.chat.completions.create(
    model=model, messages=messages, tools=TOOLS, tool_choice="none", temperature=0, max_tokens=64
)
print(answer.choices[0].message.content)
