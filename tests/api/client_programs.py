"""Programs of users of other packages, unmodified: `python client_programs.py NAME URL MODEL`.

Each prints one JSON object: what its package made of the answers. They run in processes of their
own, so that what the packages do at import stays there.
"""

import json
import sys
from typing import Any, Literal

from pydantic import BaseModel, Field

ASK = "How is it in Rome?"
SEED, MAX_TOKENS = 2, 100


class Weather(BaseModel, extra="forbid"):
    """Tells the weather."""

    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=99)


class Place(BaseModel, extra="forbid"):
    """A place on the map."""

    name: str = Field(max_length=8)
    kind: Literal["city", "lake"]


class Trip(BaseModel, extra="forbid"):
    """Where to go and how the weather is there."""

    place: Place
    weather: Weather | None
    tags: list[Literal["sun", "snow"]] = Field(max_length=3)


def langchain(url: str, model: str) -> dict[str, Any]:
    """bind_tools, plain and streamed; with_structured_output by every method."""
    from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        model=model, base_url=url, api_key="none", seed=SEED, max_tokens=MAX_TOKENS, max_retries=0, stream_usage=True
    )
    bound = chat.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False, strict=True)
    answer = bound.invoke(ASK)
    streamed = AIMessageChunk(content="")
    for chunk in bound.stream(ASK):
        streamed += chunk
    result = ToolMessage("sunny", tool_call_id=answer.tool_calls[0]["id"])
    after = chat.bind_tools([Weather]).invoke([HumanMessage(ASK), answer, result], max_tokens=8)
    methods = ("json_schema", "function_calling")
    return {
        "call": answer.tool_calls[0]["args"],
        "streamed": streamed.tool_calls[0]["args"],
        "tokens": [answer.usage_metadata, streamed.usage_metadata],
        "after": after.response_metadata["finish_reason"],
        "structured": [
            chat.with_structured_output(Trip, method=method, strict=True).invoke(ASK).model_dump() for method in methods
        ],
    }


def litellm(url: str, model: str) -> dict[str, Any]:
    """Tools, plain and streamed; a Pydantic model as `response_format`."""
    import litellm as package

    def complete(**more: Any) -> Any:
        return package.completion(
            model=f"openai/{model}",
            api_base=url,
            api_key="none",
            messages=[{"role": "user", "content": ASK}],
            seed=SEED,
            max_tokens=MAX_TOKENS,
            num_retries=0,
            **more,
        )

    function = {"name": "Weather", "description": Weather.__doc__, "parameters": Weather.model_json_schema()}
    tools: Any = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    answer = complete(**tools, parallel_tool_calls=False)
    streamed = package.stream_chunk_builder(list(complete(**tools, parallel_tool_calls=False, stream=True)))
    found = complete(response_format=Trip)
    return {
        "call": json.loads(answer.choices[0].message.tool_calls[0].function.arguments),
        "streamed": json.loads(streamed.choices[0].message.tool_calls[0].function.arguments),
        "after": answer.choices[0].finish_reason,
        "structured": [json.loads(found.choices[0].message.content)],
    }


if __name__ == "__main__":
    name, url, model = sys.argv[1:]
    print(json.dumps({"langchain": langchain, "litellm": litellm}[name](url, model)))
