"""Whatever ids a model samples, over whatever vocabulary: an answer comes, and it is one text on
every way out."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve_app.text.tokenizer import Tokenizer
from tests.api.conftest import Api
from tests.examples import examples
from tests.sentencepiece import sentencepiece_tokenizer
from tests.text.formats import tokenizer_of

VOCABULARIES: dict[str, Callable[[], Tokenizer]] = {
    "byte fallback": lambda: Tokenizer(sentencepiece_tokenizer(), "sentencepiece"),
    "byte level": lambda: tokenizer_of("hermes"),
}


def streamed_text(body: str) -> str:
    """Of a stream of completions, which must have come to its end."""
    *events, done, nothing = body.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("kind", VOCABULARIES)
async def test_a_run_of_bytes_that_breaks_ends_no_answer(scripted: Api, kind: str) -> None:
    tokenizer = VOCABULARIES[kind]()
    scripted.service.tokenizer = tokenizer
    known = tokenizer._backend.get_vocab()
    letters = [known[piece] for piece in ("<0x0A>", "<0xE6>", "a")] if kind == "byte fallback" else [*range(140, 240)]

    @settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(ids=st.lists(st.sampled_from(letters) | st.integers(3, tokenizer.vocab_size - 1), min_size=1, max_size=12))
    def check(ids: list[int]) -> None:
        answers.append(ids)

    answers: list[list[int]] = [letters[:3]]
    check()
    for ids in answers:
        scripted.service.ids = ids
        body: dict[str, Any] = {"prompt": [3], "max_tokens": len(ids) + 1, "return_token_ids": True}
        [choice] = (await scripted.http.post("/v1/completions", json={**body, "logprobs": 1})).json()["choices"]
        stream = await scripted.http.post("/v1/completions", json={**body, "stream": True})
        assert streamed_text(stream.text) == choice["text"]
        assert len(choice["logprobs"]["tokens"]) == len(ids)
        whole = await scripted.http.post("/detokenize", json={"tokens": ids})
        echoed = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 0}
        [echo] = (await scripted.http.post("/v1/completions", json=echoed)).json()["choices"]
        assert echo["text"] == whole.json()["prompt"]
        assert len(echo["logprobs"]["text_offset"]) == len(ids)
        shown = set(ids).isdisjoint(tokenizer.special_ids.values())
        assert not shown or choice["text"].removeprefix(" ") == whole.json()["prompt"].removeprefix(" ")
