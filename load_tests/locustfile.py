"""Chatting users, for one server or a cluster, headless or with locust's own page:

    locust -f load_tests/locustfile.py --headless -u 16 -r 4 -t 5m --host http://127.0.0.1:8000
    --report report.html locust -f load_tests/locustfile.py --host http://127.0.0.1:8000       #
    page on port 8089, our report on /report locust -f load_tests/locustfile.py --processes 4 ...
    # several processes, one report

Decides how users behave. Each holds conversations of several turns (so that the next prompt begins
with what the server has just computed), under one of a few long system prompts that many users
share, asks short and long questions, and sometimes disconnects in the middle of an answer.
`--shape` decides the number of users over time. `locust_results` decides what is counted and the
exit status when the objective is missed.
"""

import itertools
import json
import math
import random
import time
from typing import Any

from locust import HttpUser, LoadTestShape, events, task
from locust.exception import StopUser
from requests import RequestException

from load_tests.locust_results import Collector, report_turn
from serve_app.workloads.client import RequestResult
from serve_app.workloads.mixes import WorkItem

SHAPES = ("steady", "ramp", "spike")
INSTRUCTIONS = 4
CONTEXT_TOKENS = 1200
"""A conversation that has grown beyond this ends, so that answers keep the lengths drawn below."""
HANG_UP_SHARE = 0.05
TURNS = (1, 6)
_CHAT = "/v1/chat/completions"
_SUBJECTS = ("the sea", "an old clock", "bread", "a railway", "glass", "rain", "a library", "bees", "salt", "a mill")
_REQUESTS = (
    "Tell me about {}.",
    "Why does {} matter to people who live far from it?",
    "Write a short story about {} and {}.",
    "Compare {} with {} in two sentences.",
)
_FILLER = "For context, I have been reading about {} and {} and would like an answer that takes both into account."
_user_numbers = itertools.count()
collector = Collector()


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    """Our options beside locust's own; its page shows them too."""
    parser.add_argument("--shape", choices=SHAPES, default="steady", help="How many users there are over time")
    parser.add_argument("--pace", type=float, default=5.0, help="Mean seconds between the starts of a user's turns")
    parser.add_argument(
        "--seed", type=int, default=0, help="Seed of what users say; change it for a second run on the same server"
    )


collector.listen(events)


class ChatUser(HttpUser):
    """One user. A turn is one task; the conversation continues from turn to turn."""

    host = "http://127.0.0.1:8000"

    def on_start(self) -> None:
        """Learn the model's name."""
        options = self.environment.parsed_options
        self._pace = float(options.pace)
        self._rng = random.Random(
            f"{options.seed}-{getattr(self.environment.runner, 'worker_index', 0)}-{next(_user_numbers)}"
        )
        self._turn_start = 0.0
        self._messages: list[dict[str, str]] = []
        self._turns_left = 0
        with self.client.get("/v1/models", catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"status {response.status_code}")
                raise StopUser
            self._model = response.json()["data"][0]["id"]

    def wait_time(self) -> float:
        """Turns start at the chosen pace, not in step with other users; after a late answer the
        next starts at once."""
        return max(0.0, self._turn_start + self._pace * self._rng.uniform(0.5, 1.5) - time.perf_counter())

    @task
    def turn(self) -> None:
        """Ask, read the answer event by event, and remember it."""
        self._turn_start = time.perf_counter()
        if self._turns_left == 0:
            self._turns_left = self._rng.randint(*TURNS)
            self._messages = [{"role": "system", "content": instructions(self._rng.randrange(INSTRUCTIONS))}]
        self._messages.append({"role": "user", "content": question(self._rng)})
        answer = self._ask(hang_up=self._rng.random() < HANG_UP_SHARE)
        self._turns_left -= 1
        if answer.cancelled or answer.error is not None or _tokens(answer) > CONTEXT_TOKENS:
            self._turns_left = 0
        report_turn(self.environment, collector, answer)

    def _ask(self, hang_up: bool) -> RequestResult:
        max_tokens = min(192, max(4, round(self._rng.expovariate(1 / 48))))
        body = {
            "model": self._model,
            "messages": self._messages,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        result = RequestResult(WorkItem("", 0, max_tokens), due_s=time.time())
        # Some disconnect before the first token, some later.
        patience = self._rng.randrange(max_tokens) if hang_up else None
        start = time.perf_counter()
        with self.client.post(_CHAT, json=body, stream=True, catch_response=True) as response:
            result.status = response.status_code
            try:
                if response.status_code == 200:
                    self._read(response, result, start, patience)
                else:
                    result.error = f"status {response.status_code} {response.error or ''}".strip()
            except (RequestException, ValueError) as error:
                result.error = f"{type(error).__name__}: {error}"
            result.e2e_s = time.perf_counter() - start
            if result.error is not None:
                response.failure(result.error)
            else:
                response.success()
            response.close()
        return result

    def _read(self, response: Any, result: RequestResult, start: float, patience: int | None) -> None:
        """Read events until the end, or until `patience` tokens were enough; times and tokens go to
        `result`."""
        text, last, done = "", start, False
        for line in response.iter_lines(chunk_size=None):
            if patience is not None and result.output_tokens >= patience:
                result.cancelled = True
                return
            payload = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if payload == b"[DONE]":
                done = True
            elif payload:
                event = json.loads(payload)
                if event.get("error"):
                    result.error = str(event["error"])[:300]
                usage = event.get("usage") or {}
                result.output_tokens = usage.get("completion_tokens", result.output_tokens)
                result.prompt_tokens = usage.get("prompt_tokens", result.prompt_tokens)
                piece = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
                if piece:
                    now = time.perf_counter()
                    if result.ttft_s is None:
                        result.ttft_s = now - start
                    else:
                        result.gaps_s.append(now - last)
                    last, text = now, text + piece
        if result.error is None and not (done and result.output_tokens and text):
            result.error = "the answer contained no token or did not end properly"
        self._messages.append({"role": "assistant", "content": text})


def _tokens(answer: RequestResult) -> int:
    return (answer.prompt_tokens or 0) + answer.output_tokens


def instructions(number: int) -> str:
    """One of the long system prompts that users share; about 200 words."""
    rng = random.Random(f"instructions-{number}")
    pairs = (rng.sample(_SUBJECTS, 2) for _ in range(9))
    rules = [
        f"Rule {i + 1}: when somebody mentions {a}, think of {b} and say how the two belong together."
        for i, (a, b) in enumerate(pairs)
    ]
    return " ".join([f"You are assistant number {number + 1}, patient, brief and exact.", *rules])


def question(rng: random.Random) -> str:
    """What a user asks: one question after up to 200 words of context, short far more often than
    long."""
    ask = rng.choice(_REQUESTS)
    fillers = int(math.exp(rng.uniform(0.0, math.log(12)))) - 1
    sentences = [_FILLER] * fillers + [ask]
    return " ".join(sentence.format(*rng.sample(_SUBJECTS, 2)) for sentence in sentences)


class Crowd(LoadTestShape):
    """The number of users over time; locust's options for users, spawn rate and run time apply.

    steady: all. ramp: from one to all over four fifths of the run. spike: a quarter; in the middle
    third, all.
    """

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """Users wanted now and how many may be added or removed per second; None at the end of the
        run time."""
        options = self.runner.environment.parsed_options
        users, run_time = options.num_users or 1, float(options.run_time or 0)
        passed = self.get_run_time()
        if run_time and passed >= run_time:
            # Locust's own end of a headless run does not wait for its workers' last reports.
            self.runner.stop()
            return None
        wanted = users_wanted(options.shape, users, passed / (run_time or 60.0))
        return wanted, float(options.spawn_rate or 1.0) if options.shape == "steady" else float(users)


def users_wanted(shape: str, users: int, passed: float) -> int:
    """Users wanted when the share `passed` of the run is over."""
    if shape == "ramp":
        return max(1, math.ceil(users * min(1.0, passed / 0.8)))
    if shape == "spike":
        return users if 1 / 3 <= passed < 2 / 3 else max(1, users // 4)
    return users
