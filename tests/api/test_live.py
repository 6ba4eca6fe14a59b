"""The whole path below Ray: a real HTTP server, a real engine, and clients that come, read, stop
and vanish."""

import asyncio
from typing import Any

import openai
import pytest

from tests.api.conftest import Api, idle

ASK: list[Any] = [{"role": "user", "content": "Say something."}]


async def stream_text(api: Api, body: dict[str, Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    async for chunk in await api.openai.completions.create(model="babbler", stream=True, **body):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_streamed_and_whole_answers_agree(live: Api, temperature: float) -> None:
    """Random tokens are full of half characters; each text must come out the same either way, torn
    nowhere."""
    body: dict[str, Any] = {
        "prompt": ["One", "Two two", "Three"], "n": 2, "max_tokens": 40, "temperature": temperature, "seed": 5,
    }  # fmt: skip
    whole = await live.openai.completions.create(model="babbler", **body)
    texts = {choice.index: choice.text for choice in whole.choices}
    assert await stream_text(live, body) == texts
    assert len(texts) == 6
    assert (texts[0] == texts[1]) == (temperature == 0)
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 240
    again = await live.openai.completions.create(model="babbler", **body)
    assert {choice.index: choice.text for choice in again.choices} == texts


async def test_stop_strings_cut_the_same_text(live: Api) -> None:
    body: dict[str, Any] = {
        "prompt": "One",
        "max_tokens": 60,
        "temperature": 1,
        "seed": 3,
        "extra_body": {"ignore_eos": True},
    }
    full = (await live.openai.completions.create(model="babbler", **body)).choices[0].text
    stop = full[30:34]
    body["stop"] = [stop]
    [choice] = (await live.openai.completions.create(model="babbler", **body)).choices
    assert (choice.text, choice.finish_reason) == (full[: full.index(stop)], "stop")
    assert await stream_text(live, body) == {0: choice.text}


async def test_usage_finish_reasons_and_the_cache(live: Api) -> None:
    body: dict[str, Any] = {"model": "babbler", "messages": ASK * 8, "max_tokens": 5, "seed": 1}
    first = await live.openai.chat.completions.create(**body, extra_body={"ignore_eos": True})
    second = await live.openai.chat.completions.create(**body, extra_body={"ignore_eos": True})
    assert [c.finish_reason for c in first.choices] == ["length"]
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.completion_tokens == 5
    assert first.usage.prompt_tokens == len(live.service.tokenizer.apply_chat_template(ASK * 8))
    cached = [u.prompt_tokens_details.cached_tokens for u in (first.usage, second.usage) if u.prompt_tokens_details]
    assert cached[0] == 0
    assert cached[1] is not None
    assert 0 < cached[1] < first.usage.prompt_tokens
    assert second.choices[0].message.content == first.choices[0].message.content


async def test_logprobs_and_echo(live: Api) -> None:
    prompt = "One two three"
    answer = await live.openai.completions.create(
        model="babbler", prompt=prompt, echo=True, logprobs=2, max_tokens=4, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert "".join(logprobs.tokens[:3]) == prompt
    assert logprobs.token_logprobs[0] is None
    assert all(p < 0 for p in logprobs.token_logprobs[1:])
    for token, logprob, top in list(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True))[
        3:
    ]:
        assert max(top.values()) == top[token] == logprob  # greedy takes the most likely
    chat = await live.openai.chat.completions.create(
        model="babbler", messages=ASK, logprobs=True, top_logprobs=3, max_tokens=6, seed=1
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 6
    assert all(len(token.top_logprobs) == 3 for token in content)


async def test_what_the_engine_cannot_take_is_refused_before_the_stream(live: Api) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await live.openai.completions.create(model="babbler", prompt="x", max_tokens=600, stream=True)
    assert (refused.value.param, refused.value.code) == ("max_tokens", "context_length_exceeded")
    assert refused.value.request_id


async def test_a_client_that_vanishes_frees_slot_and_blocks(live: Api) -> None:
    body = {"prompt": "One", "max_tokens": 500, "ignore_eos": True, "stream": True}
    async with live.http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            assert line.startswith("data: ")
            break
        assert live.service.engine.stats().running == 1
    await idle(live)
    assert live.observer.num_tokens < 500


async def test_a_storm_of_vanishing_clients_leaves_nothing(live: Api) -> None:
    """Before the first token, in the stream, while queued here or in the engine; some stay and are
    served."""
    gone = 0

    async def client(i: int) -> int:
        nonlocal gone
        body = {"prompt": f"Number {i}", "max_tokens": 60, "ignore_eos": True, "stream": True, "seed": i}
        async with live.http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return answer.status_code
            num_lines = 0
            async for _ in answer.aiter_lines():
                num_lines += 1
                if i % 3 == 0 and num_lines > i:
                    gone += 1
                    return 0
        return 200

    async def impatient(i: int) -> int:
        task = asyncio.create_task(client(i))
        if i % 3 == 1:
            await asyncio.wait({task}, timeout=0.002 * i)
            task.cancel()
        return (await asyncio.gather(task, return_exceptions=True))[0] if not task.cancelled() else 0

    results = await asyncio.gather(*(impatient(i) for i in range(36)))
    assert gone > 0
    assert set(r for r in results if isinstance(r, int)) <= {0, 200, 429}
    await idle(live)
    answer = await live.http.post("/v1/completions", json={"prompt": "One", "max_tokens": 3})
    assert answer.status_code == 200


async def test_of_the_choices_the_likeliest_are_told(live: Api) -> None:
    body: dict[str, Any] = {"model": "babbler", "prompt": ["Once", "Twice"], "max_tokens": 12, "seed": 3}
    whole = await live.openai.completions.create(**body, n=4, logprobs=0)
    expected = []
    for first in (0, 4):
        choices = whole.choices[first : first + 4]
        likelihoods = {c.text: sum(c.logprobs.token_logprobs) / len(c.logprobs.tokens) for c in choices if c.logprobs}
        expected += sorted(likelihoods, key=lambda text: -likelihoods[text])[:2]
    best = await live.openai.completions.create(**body, n=2, best_of=4)
    assert [(choice.index, choice.text, choice.logprobs) for choice in best.choices] == [
        (index, text, None) for index, text in enumerate(expected)
    ]
    assert best.usage is not None
    assert whole.usage is not None
    assert best.usage.completion_tokens == whole.usage.completion_tokens
