"""Users over HTTP: `locust -f load_tests/locustfile.py --headless -u 16 -r 4 -t 1m --host http://127.0.0.1:8000`.

Every user asks, reads the streamed answer to its end, thinks a little and asks again. Decides how users behave and
which figures locust gets beside its own: `TTFT` (time to first token), `ITL` (mean time between an answer's tokens).
"""

import json
import random
import time
from typing import Any

from locust import HttpUser, between, task
from locust.exception import StopUser

_QUESTIONS = (
    "What is the capital of France?",
    "Name three animals that live in the sea.",
    "Explain in two sentences what a neural network is.",
    "Write a short poem about autumn.",
    "How do I boil an egg?",
)
_LENGTHS = (8, 16, 32, 64, 128)
_CHAT = "/v1/chat/completions"


class ChatUser(HttpUser):
    """Asks one question after another, in a stream."""

    wait_time = between(0.2, 2.0)
    host = "http://127.0.0.1:8000"

    def on_start(self) -> None:
        """Learn the model's name."""
        with self.client.get("/v1/models", catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"status {response.status_code}")
                raise StopUser
            self.model = response.json()["data"][0]["id"]

    @task
    def ask(self) -> None:
        """One question, its answer read event by event."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": random.choice(_QUESTIONS)}],
            "max_tokens": random.choice(_LENGTHS),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start = time.perf_counter()
        with self.client.post(_CHAT, json=body, stream=True, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"status {response.status_code}")
                return
            first, last, tokens = self._read(response, start)
            if first is None or not tokens:
                response.failure("the answer held no token or did not end properly")
                return
        self._report("TTFT", first - start)
        if tokens > 1:
            self._report("ITL", (last - first) / (tokens - 1))

    def _read(self, response: Any, start: float) -> tuple[float | None, float, int]:
        """Times of the first and the last event with content, and the number of tokens that the server counted.

        The number is 0 when the stream broke off: `[DONE]` never came.
        """
        first, last, tokens, done = None, start, 0, False
        for line in response.iter_lines():
            payload = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if payload == b"[DONE]":
                done = True
            elif payload:
                event = json.loads(payload)
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                if any(choice["delta"].get("content") for choice in event.get("choices", ())):
                    last = time.perf_counter()
                    first = last if first is None else first
        return first, last, tokens if done else 0

    def _report(self, name: str, seconds: float) -> None:
        """A figure of our own in locust's statistics, in milliseconds."""
        self.environment.events.request.fire(
            request_type="stream",
            name=name,
            response_time=1000 * seconds,
            response_length=0,
            exception=None,
            context={},
        )
