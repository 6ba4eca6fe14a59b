"""What agents and load tools send: a loop that finishes, and bodies as they were recorded or as
their sources say."""

from typing import Any

import pytest
from anthropic.lib.tools import beta_async_tool

from tests.api.conftest import Api, prompt
from tests.api.sdks import anthropic_of
from tests.api.weather import CALL, CHAT_TOOLS, MESSAGES

ANSWER = "Sunny for three days."


@pytest.mark.parametrize("stream", [False, True])
async def test_a_loop_of_anthropics_tool_runner_finishes(scripted: Api, stream: bool) -> None:
    scripted.service.replies = ["Let me see." + CALL, ANSWER]
    asked = []

    @beta_async_tool
    async def weather(city: str, days: int) -> str:
        """Tells it."""
        asked.append((city, days))
        return "It is sunny."

    async with anthropic_of(scripted.app) as client:
        runner: Any = client.beta.messages.tool_runner(  # type: ignore[call-overload]
            model="scripted", max_tokens=200, messages=MESSAGES, tools=[weather], stream=stream, thread=False
        )
        message = await runner.until_done()
    assert asked == [("Rome", 3)]
    assert [block.text for block in message.content] == [ANSWER]
    assert message.stop_reason == "end_turn"
    assert "Let me see." in prompt(scripted)
    assert "It is sunny." in prompt(scripted)


USAGE = {"include_usage": True}
RUNNING_USAGE = {"include_usage": True, "continuous_usage_stats": True}
PART = {"type": "text", "text": "Capital of France?"}
ARGUMENTS = '{"city": "Rome", "days": 3}'
CALLED = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
STRICT = {
    "properties": {"city": {"title": "City", "type": "string"}, "days": {"title": "Days", "type": "integer"}},
    "required": ["city", "days"],
    "title": "weather_args",
    "type": "object",
    "additionalProperties": False,
}
# openai-agents 0.24.0: recorded in a loop that finished over this API. The load tools' are what
# their sources make:
# vLLM's endpoint_request_func.py, guidellm's request_handlers.py (003104dd), aiperf's endpoints/
# (00a8e858).
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "openai-agents, responses": (
        "/v1/responses",
        {"stream": True, "include": [], "instructions": "Be brief.", "temperature": 0.2,
         "tools": [{"name": "weather", "parameters": STRICT, "strict": True, "type": "function",
                    "description": "Tells the weather."}],
         "input": [
            {"content": "How is it in Rome?", "role": "user"},
            {"arguments": ARGUMENTS, "call_id": "call_1", "name": "weather", "type": "function_call", "id": "fc_1",
             "status": "completed"},
            {"call_id": "call_1", "output": "Sunny.", "type": "function_call_output"}]},
    ),
    "openai-agents, chat": (
        "/v1/chat/completions",
        {"stream": True, "temperature": 0.2,
         "tools": [{"type": "function", "function": {
            "name": "weather", "description": "Tells the weather.", "parameters": STRICT, "strict": True}}],
         "messages": [
            {"content": "Be brief.", "role": "system"}, {"role": "user", "content": "How is it in Rome?"},
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."}]},
    ),
    "vllm bench serve, openai": (
        "/v1/completions",
        {"prompt": "France", "repetition_penalty": 1.0, "max_tokens": 4, "logprobs": None, "stream": True,
         "stream_options": USAGE, "ignore_eos": True, "temperature": 0.0},
    ),
    "vllm bench serve, openai-chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [PART]}], "max_completion_tokens": 4, "stream": True,
         "stream_options": USAGE, "ignore_eos": True},
    ),
    "vllm bench serve, openai-responses": (
        "/v1/responses",
        {"input": "Capital of France?", "max_output_tokens": 4, "stream": True, "ignore_eos": True},
    ),
    "guidellm, completions": (
        "/v1/completions",
        {"stream": True, "stream_options": RUNNING_USAGE, "max_tokens": 4, "stop": None, "ignore_eos": True,
         "prompt": "France"},
    ),
    "guidellm, chat": (
        "/v1/chat/completions",
        {"stream": True, "stream_options": RUNNING_USAGE, "max_completion_tokens": 4, "stop": None,
         "ignore_eos": True, "messages": [{"role": "user", "content": [PART]}]},
    ),
    "guidellm, a turn after a call": (
        "/v1/chat/completions",
        {"stream": True, "stream_options": RUNNING_USAGE, "max_completion_tokens": 4, "tools": CHAT_TOOLS,
         "tool_choice": "none", "messages": [
            {"role": "user", "content": [PART]}, {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "call_1", "content": '{"status": "ok"}'}]},
    ),
    "guidellm, responses": (
        "/v1/responses",
        {"stream": True, "max_output_tokens": 4, "stop": None, "ignore_eos": True, "instructions": "Be brief.",
         "input": [{"role": "user", "content": [{"type": "input_text", "text": "Capital of France?"}]},
                   {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "Sure?"}]},
    ),
    "aiperf, completions": (
        "/v1/completions",
        {"prompt": ["France"], "stream": True, "max_tokens": 4, "min_tokens": 4, "ignore_eos": True,
         "stream_options": USAGE},
    ),
    "aiperf, chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital of France?"}],
         "stream": True, "max_completion_tokens": 4, "stream_options": RUNNING_USAGE},
    ),
    "aiperf, responses": (
        "/v1/responses",
        {"input": [{"type": "message", "role": "user", "content": "Capital of France?"}], "stream": True,
         "instructions": "Be brief.", "max_output_tokens": 4, "stream_options": USAGE},
    ),
    "aiperf, messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "Capital of France?"}], "max_tokens": 16384, "stream": True,
         "system": "Be brief."},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=list(BODIES))
async def test_what_they_send_is_answered(scripted: Api, path: str, body: dict[str, Any]) -> None:
    answer = await scripted.http.post(path, json={"model": "scripted", **body})
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.text
    assert "event: error" not in answer.text
