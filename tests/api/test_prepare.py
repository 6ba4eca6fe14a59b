"""Text work that takes long leaves the event loop."""

import threading
from typing import Any

import pytest

from tests.api.conftest import Api


async def test_many_empty_messages_are_rendered_beside_the_event_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No text at all, but a template takes its time for each."""
    tokenizer = api.service.tokenizer
    render, on_the_loop = tokenizer.apply_chat_template, []

    def watched(messages: Any) -> Any:
        on_the_loop.append(threading.current_thread() is threading.main_thread())
        return render(messages)

    monkeypatch.setattr(tokenizer, "apply_chat_template", watched)
    for count in (1, 200):
        messages = [{"role": "user", "content": ""}] * count
        assert (await api.http.post("/v1/chat/completions", json={"messages": messages})).status_code == 200
    assert on_the_loop == [True, False]
