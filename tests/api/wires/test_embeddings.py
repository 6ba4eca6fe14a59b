"""POST /v1/embeddings over a real engine: OpenAI's four forms of input, both encodings, and large
requests."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from serve_app.api.admission import AsyncAdmissionQueue
from serve_app.api.request_events import Outcome
from serve_app.errors import EngineError
from serve_app.text.tokenizer import Tokenizer
from tests.api.conftest import Api, babbler_module, build_api
from tests.api.limits import make_limits
from tests.api.services import ScriptedService
from tests.api.test_accounts import Charged, server
from tests.api.test_bad_input import refused

__all__ = ["server"]

PATH = "/v1/embeddings"
TEXTS = ["One", "Two words", "A third text, the longest one of them all: " + "long " * 60]


@pytest.fixture
def strict(live: Api) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="none",
        base_url=live.openai.base_url,
        http_client=live.http,
        max_retries=0,
        _strict_response_validation=True,
    )


async def until(condition: Callable[[], bool]) -> None:
    """The test's time limit ends what never comes."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.002)


def expected(token_ids: list[int], pooling: str = "last", dimensions: int | None = None) -> list[float]:
    with torch.inference_mode():
        states = babbler_module().base_model(torch.tensor([token_ids])).last_hidden_state[0].double()
    vector = (states[-1] if pooling == "last" else states.mean(0))[:dimensions]
    found: list[float] = (vector / vector.norm()).tolist()
    return found


def assert_close(found: list[float], wanted: list[float]) -> None:
    np.testing.assert_allclose(found, wanted, atol=1e-5)


async def test_the_sdk_gets_what_transformers_computes(live: Api, strict: openai.AsyncOpenAI) -> None:
    """It asks for base64 if the caller does not say, which its own types do not know: strictly it
    reads floats only."""
    tokenizer = live.service.tokenizer
    asked: dict[str, Any] = {"model": "babbler", "input": TEXTS, "user": "somebody"}
    for create in (live.openai.embeddings.create, partial(strict.embeddings.create, encoding_format="float")):
        answer = await create(**asked)
        assert [entry.index for entry in answer.data] == [0, 1, 2]
        for entry, text in zip(answer.data, TEXTS, strict=True):
            assert_close(entry.embedding, expected(tokenizer.encode(text)))
        tokens = sum(len(tokenizer.encode(text)) for text in TEXTS)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    assert live.observer.ended == [("embeddings", Outcome.COMPLETED, tokens, 0)] * 2
    assert live.observer.num_tokens == 0


async def test_all_four_forms_of_input(live: Api, tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(text) for text in TEXTS]
    forms: list[Any] = [TEXTS[0], TEXTS, ids[0], ids]
    answers = [(await live.openai.embeddings.create(model="babbler", input=form)).data for form in forms]
    vectors = [[entry.embedding for entry in answer] for answer in answers]
    assert vectors == [vectors[1][:1], vectors[1], vectors[1][:1], vectors[1]]


async def test_dimensions_and_pooling(live: Api, tokenizer: Tokenizer) -> None:
    for pooling in ("last", "mean"):
        answer = await live.openai.embeddings.create(
            model="babbler", input=TEXTS, dimensions=7, extra_body={"pooling": pooling}
        )
        for entry, text in zip(answer.data, TEXTS, strict=True):
            assert_close(entry.embedding, expected(tokenizer.encode(text), pooling, 7))


async def test_truncation_keeps_the_end(live: Api) -> None:
    ids = [3 + i % 1000 for i in range(600)]
    for most, kept in ((5, ids[-5:]), (-1, ids[-512:])):
        answer = await live.http.post(PATH, json={"input": ids, "truncate_prompt_tokens": most})
        assert answer.json()["usage"]["prompt_tokens"] == len(kept)
        assert_close(answer.json()["data"][0]["embedding"], expected(kept))


async def test_a_large_request_leaves_room_for_others(live: Api) -> None:
    """The queue holds 12 sequences in all; half of the engine's slots are enough for any number of
    inputs."""
    inputs = [[3 + i % 200] * (1 + i % 40) for i in range(500)]
    running = asyncio.create_task(live.http.post(PATH, json={"input": inputs, "encoding_format": "base64"}))
    await until(lambda: len(live.observer.waits) >= 20)
    assert live.admission.ongoing == 4
    other = await live.openai.completions.create(model="babbler", prompt="x", max_tokens=3)
    assert other.usage is not None
    assert not running.done()
    answer = (await running).raise_for_status().json()
    assert [entry["index"] for entry in answer["data"]] == [*range(500)]
    assert answer["data"][5]["embedding"] == answer["data"][205]["embedding"] != answer["data"][6]["embedding"]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, inputs))


async def test_a_client_that_leaves_ends_all_of_it(live: Api) -> None:
    """The fixture checks that the engine is empty afterwards."""
    asked = asyncio.create_task(live.http.post(PATH, json={"input": [[5] * 100] * 1000}))
    await until(lambda: len(live.observer.waits) >= 20)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await until(lambda: bool(live.observer.ended))
    assert [(endpoint, outcome) for endpoint, outcome, *_ in live.observer.ended] == [("embeddings", Outcome.CANCELLED)]
    assert len(live.observer.waits) < 1000


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({}, "input", "is required"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "a list of strings"),
        ({"input": ["a", ""]}, "input[1]", "must not be empty"),
        ({"input": [[3], []]}, "input[1]", "must not be empty"),
        ({"input": ["a", 3]}, "input", "a list of strings"),
        ({"input": {"text": "a"}}, "input", "a list of strings"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": [3, 999_999]}, "input", "ids from 0 to 49151"),
        ({"input": ["a", "b " * 3000]}, "input[1]", "context is 2048"),
        ({"input": [[3] * 2049]}, "input", "2049 tokens, but this model's context is 2048"),
        ({"input": "a", "dimensions": 65}, "dimensions", "at most 64, the length of this model's embeddings"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "pooling": "max"}, "pooling", "'last' or 'mean'"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
        ({"input": "a", "user": 5}, "user", "string"),
        ({"input": "a", "normalize": False}, "normalize", "is supported only as true"),
        ({"input": "a", "temperature": 1}, "temperature", "not a field"),
    ],
)
async def test_wrong_input_is_refused_by_name(api: Api, fields: dict[str, Any], param: str, said: str) -> None:
    error = await refused(api, PATH, 400, fields)
    assert error["param"] == param
    assert said in error["message"]
    assert not api.service.requests or api.service.requests[0].params.pooling is None


async def test_the_wrong_model_is_404(api: Api) -> None:
    assert (await refused(api, PATH, 404, {"input": "a", "model": "other"}))["code"] == "model_not_found"


async def test_the_numbers_of_an_answer_are_bounded(tokenizer: Tokenizer) -> None:
    limits = make_limits(max_embedding_numbers=640)
    api = build_api(ScriptedService(tokenizer), AsyncAdmissionQueue(4, 2), limits)
    async with api.http:
        for dimensions, most in ((None, 10), (8, 80)):
            body = {"input": ["a"] * most, "dimensions": dimensions}
            answer = (await api.http.post(PATH, json=body)).raise_for_status().json()
            assert [len(entry["embedding"]) for entry in answer["data"]] == [dimensions or 64] * most
            error = (await api.http.post(PATH, json={**body, "input": ["a"] * (most + 1)})).json()["error"]
            assert error["param"] == "input"
            assert f"at most {most} inputs with {dimensions or 64} dimensions" in error["message"]


async def test_an_engine_that_fails_is_an_error_of_the_server(api: Api) -> None:
    api.service.error, api.service.error_at = EngineError("broken"), 0
    answer = await api.http.post(PATH, json={"input": ["a", "b"]})
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "broken")


async def ask(server: Charged, key: str, count: int) -> httpx.Response:
    return await server.http.post(PATH, json={"input": [[5, 6]] * count}, headers={"x-api-key": key})


async def test_keys_are_charged_for_what_was_read(server: Charged) -> None:
    """One that may have two sequences at once may have any number of inputs."""
    assert (await ask(server, "narrow", 40)).status_code == 200
    [entry] = server.ledger()
    assert (entry["endpoint"], entry["prompt_tokens"], entry["output_tokens"]) == ("embeddings", 80, 0)
    assert [(s.endpoint, len(s.engine_ids)) for s in server.summaries] == [("embeddings", 40)]
    assert (await ask(server, "minute", 34)).status_code == 400
    assert (await server.usage("narrow"))["sequences"] == 0
