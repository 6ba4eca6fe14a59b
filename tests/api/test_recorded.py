"""What agents' loops and load tools send: loops that finish, and bodies as their sources make them."""

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
            model="scripted", max_tokens=200, messages=MESSAGES, tools=[weather], stream=stream
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
CALLED = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 3}'},
}
# Of vLLM's endpoint_request_func.py, guidellm's request_handlers.py (003104dd) and aiperf's endpoints/ (00a8e858).
LOADS: dict[str, tuple[str, dict[str, Any]]] = {
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


@pytest.mark.parametrize(("path", "body"), LOADS.values(), ids=list(LOADS))
async def test_load_tools_are_answered(scripted: Api, path: str, body: dict[str, Any]) -> None:
    answer = await scripted.http.post(path, json={"model": "scripted", **body})
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.text
    assert "event: error" not in answer.text
