"""The chaos suite's client: each way an answer can go wrong is told apart, and a lost or doubled
token is seen."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from load_tests.chaos.traffic import (
    Answer,
    Ask,
    Outcome,
    ask,
    compare,
    open_narrow_session,
    open_session,
    send,
    send_into,
    send_until_taken,
)

SAID = "some text that came"
ASK = ask("one", "prompt", len(SAID))
ERROR = {"error": {"type": "server_error", "code": "unavailable", "message": "gone"}}


def event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def chunk(text: str, finish_reason: str | None = None, index: int = 0) -> bytes:
    return event({"choices": [{"index": index, "text": text, "finish_reason": finish_reason}], "usage": None})


def usage(tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 6, "completion_tokens": tokens}})


DONE = b"data: [DONE]\n\n"
WHOLE = chunk(SAID[:4]) + chunk(SAID[4:], "length") + usage(len(SAID)) + DONE
OK = ("200 OK", 7, WHOLE)


@asynccontextmanager
async def answering(*answers: tuple[str, float, bytes]) -> AsyncIterator[str]:
    """A server that gives these answers (status, seconds to come back after, body), the last one
    for good, and closes each connection; yields its address."""
    left = iter(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        status, retry_after_s, body = next(left, answers[-1])
        head = f"HTTP/1.1 {status}\r\nretry-after: {retry_after_s:.3f}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def answer_to(a: Ask, body: bytes, status: str = "200 OK") -> Answer:
    async with answering((status, 7, body)) as url, open_session() as session:
        return await send(session, url, a)


async def test_a_complete_answer() -> None:
    answer = await answer_to(ASK, WHOLE)
    assert (answer.outcome, answer.texts, answer.usage) == (Outcome.COMPLETE, {0: SAID}, (6, len(SAID)))


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (WHOLE.removesuffix(DONE), Outcome.CUT),
        (chunk("some"), Outcome.CUT),
        (chunk("some") + event(ERROR), Outcome.ERROR),
        (chunk("some") + event(ERROR) + DONE, Outcome.WRONG),
        (WHOLE + chunk("more"), Outcome.WRONG),
        (WHOLE + DONE, Outcome.WRONG),
        (chunk(SAID) + usage(len(SAID)) + DONE, Outcome.WRONG),
        (chunk(SAID, "length") + DONE, Outcome.WRONG),
        (chunk("some") + event({"error": "gone"}), Outcome.WRONG),
    ],
)
async def test_other_ends_of_a_stream(body: bytes, outcome: Outcome) -> None:
    assert (await answer_to(ASK, body)).outcome is outcome


@pytest.mark.parametrize(
    ("status", "body", "outcome"),
    [
        ("429 Too Many Requests", json.dumps(ERROR).encode(), Outcome.ERROR),
        ("503 Service Unavailable", b"<html>nobody there</html>", Outcome.CUT),
        ("404 Not Found", b"<html>nobody there</html>", Outcome.WRONG),
        ("404 Not Found", b"Path '/v1' not found. Ping http://.../-/routes for available routes.", Outcome.CUT),
        ("500 Internal Server Error", b"Internal Server Error", Outcome.CUT),
        ("400 Bad Request", b'{"detail": "oops"}', Outcome.WRONG),
    ],
)
async def test_refusals(status: str, body: bytes, outcome: Outcome) -> None:
    answer = await answer_to(ASK, body, status)
    assert (answer.outcome, answer.retry_after_s) == (outcome, 7.0)


@pytest.mark.parametrize(
    ("wait_s", "limit_s", "outcome"),
    [(0.01, 60, Outcome.COMPLETE), (7, 6, Outcome.ERROR)],
    ids=["comes back", "not beyond the limit"],
)
async def test_whoever_wants_a_place_comes_back_when_told(wait_s: float, limit_s: float, outcome: Outcome) -> None:
    full = ("429 Too Many Requests", wait_s, json.dumps({"error": ERROR["error"] | {"code": "queue_full"}}).encode())
    async with answering(full, full, OK) as url, open_session() as session:
        answer = await send_until_taken(session, url, ASK, limit_s)
    assert answer.outcome is outcome


async def test_nobody_listens() -> None:
    async with answering(OK) as url:
        pass
    async with open_session() as session:
        assert (await send(session, url, ASK)).outcome is Outcome.CUT


def told(text: str, outcome: Outcome = Outcome.COMPLETE) -> Answer:
    return Answer(ASK, outcome, texts={0: text}, finish_reasons={0: "length"}, usage=(6, len(SAID)))


@pytest.mark.parametrize(
    ("answer", "lost", "doubled", "equal"),
    [
        (told(SAID), 0, 0, True),
        (told("some xt that came"), 2, 0, False),
        (told("some text thatat came"), 0, 2, False),
        (told("some text"), len(" that came"), 0, False),
        (told("some text", Outcome.ERROR), 0, 0, True),
        (told("some text####", Outcome.ERROR), 0, 4, False),
        (told("", Outcome.CUT), 0, 0, True),
    ],
)
def test_lost_and_doubled_tokens(answer: Answer, lost: int, doubled: int, equal: bool) -> None:
    difference = compare(answer, told(SAID))
    assert (difference.lost, difference.doubled, difference.equal) == (lost, doubled, equal)


def _without_usage(answer: Answer) -> None:
    answer.usage = (6, 3)


def _other_reason(answer: Answer) -> None:
    answer.finish_reasons = {0: "stop"}


def _other_logprobs(answer: Answer) -> None:
    answer.logprobs = {0: [("s", -0.5, 0, None)]}


@pytest.mark.parametrize("change", [_without_usage, _other_reason, _other_logprobs])
def test_equal_text_is_not_all(change: Callable[[Answer], None]) -> None:
    answer = told(SAID)
    change(answer)
    assert not compare(answer, told(SAID)).equal


def test_the_first_silence_counts_from_the_strike() -> None:
    answer = Answer(ASK, started_at=10.0, first_event_at=17.0, longest_gap_s=1.0)
    assert [answer.silence_s(struck_at) for struck_at in (0.0, 12.0, 18.0)] == [7.0, 5.0, 1.0]


async def test_a_slow_reader_gets_the_same() -> None:
    answer = Answer(ASK)
    async with answering(OK) as url, open_narrow_session() as session:
        await send_into(answer, session, url, slow_bytes=1)
    assert (answer.outcome, answer.texts) == (Outcome.COMPLETE, {0: SAID})


def test_a_choice_that_never_came_is_lost() -> None:
    both = told(SAID)
    both.texts[1] = "other"
    assert compare(told(SAID), both).lost == len("other")
