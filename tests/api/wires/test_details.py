"""What answers tell beside OpenAI's fields, and what a request may ask of its prompt. The service
is scripted."""

import json
from typing import Any

import pytest

from serve_app.text.tokenizer import Tokenizer
from tests.api.conftest import Api
from tests.sentencepiece import sentencepiece_tokenizer

ASK: list[Any] = [{"role": "user", "content": "Capital of France?"}]
REPLY = "Paris is the capital of France."
EOS = 2


def asked(path: str) -> dict[str, Any]:
    return {"messages": ASK} if path == "chat/completions" else {"prompt": "Hello there"}


async def ask(api: Api, path: str, **fields: Any) -> dict[str, Any]:
    answer = await api.http.post(f"/v1/{path}", json={**asked(path), **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def chunks(api: Api, path: str, **fields: Any) -> list[dict[str, Any]]:
    answer = await api.http.post(f"/v1/{path}", json={**asked(path), **fields, "stream": True})
    return [json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n")[:-2]]


PATHS = pytest.mark.parametrize("path", ["chat/completions", "completions"])


@PATHS
async def test_the_stop_string_or_token_that_ended_an_answer_is_told(api: Api, path: str) -> None:
    the = api.service.tokenizer.encode(" the", add_special_tokens=False)[0]
    for fields, reason in [
        ({"stop": ["zzz", "capital"]}, "capital"),
        ({"stop_token_ids": [EOS]}, EOS),
        ({"stop_token_ids": [the]}, None),  # scripted: the reply ends with EOS whatever it is asked
        ({"max_tokens": 3, "stop_token_ids": [EOS]}, None),
        ({}, None),
    ]:
        given = {"max_tokens": 20, **fields}
        [choice] = (await ask(api, path, **given))["choices"]
        assert choice["stop_reason"] == reason
        *others, last = await chunks(api, path, **given)
        assert last["choices"][0]["stop_reason"] == reason
        assert not any("stop_reason" in chunk["choices"][0] for chunk in others)


@PATHS
async def test_token_ids_are_told_where_that_is_asked_for(api: Api, path: str) -> None:
    reply = [*api.service.tokenizer.encode(REPLY, add_special_tokens=False), EOS]
    answer = await ask(api, path, max_tokens=20, n=2, return_token_ids=True)
    prompt = list(api.service.requests[0].prompt_token_ids)
    assert [choice["token_ids"] for choice in answer["choices"]] == [reply, reply]
    for told in [answer] if path == "chat/completions" else answer["choices"]:
        assert told["prompt_token_ids"] == prompt
    streamed = await chunks(api, path, max_tokens=20, n=2, return_token_ids=True)
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in streamed if chunk["choices"][0]["index"] == index]
        assert sum((choice.get("token_ids", []) for choice in mine), []) == reply
        first = streamed[0] if path == "chat/completions" else mine[0]
        assert first["prompt_token_ids"] == prompt
    assert "token_ids" not in json.dumps(await ask(api, path))


@PATHS
async def test_tokens_of_half_characters_are_told_without_text(api: Api, path: str) -> None:
    api.service.reply = "\u2603\u2603"  # each of several tokens
    streamed = await chunks(api, path, max_tokens=20, return_token_ids=True)
    told = [chunk["choices"][0]["token_ids"] for chunk in streamed if "token_ids" in chunk["choices"][0]]
    assert sum(told, []) == [*api.service.tokenizer.encode(api.service.reply, add_special_tokens=False), EOS]
    assert all(len(ids) == 1 for ids in told)


@PATHS
async def test_prompt_log_probabilities_have_vllms_shape(api: Api, path: str) -> None:
    answer = await ask(api, path, max_tokens=2, n=2, prompt_logprobs=2)
    ids = api.service.requests[0].prompt_token_ids
    for told in [answer] if path == "chat/completions" else answer["choices"]:
        first, *others = told["prompt_logprobs"]
        assert first is None
        assert len(others) == len(ids) - 1
        for token_id, entry in zip(ids[1:], others, strict=True):
            assert list(entry) == [str(token_id), str(token_id + 1)]
            assert [(e["logprob"], e["rank"]) for e in entry.values()] == [(-0.5, 1), (-1.5, 2)]
            assert entry[str(token_id)]["decoded_token"] == api.service.tokenizer.decode([token_id])
    [only] = (await ask(api, path, max_tokens=2, prompt_logprobs=0))["choices"]
    assert only["finish_reason"] == "length"


async def test_echo_and_prompt_log_probabilities_have_their_own_widths(api: Api) -> None:
    answer = await ask(api, "completions", max_tokens=1, echo=True, logprobs=1, prompt_logprobs=3)
    [choice] = answer["choices"]
    assert [top and len(top) for top in choice["logprobs"]["top_logprobs"]] == [None, 1, 1]
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [3]


async def test_a_prompt_is_scored_without_an_answer(api: Api) -> None:
    answer = await api.openai.completions.create(
        model="scripted", prompt="Hello there", echo=True, logprobs=1, max_tokens=0, n=2
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    for choice in answer.choices:
        assert (choice.text, choice.finish_reason) == ("Hello there", "length")
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == ["Hello", " there"]
        assert choice.logprobs.token_logprobs == [None, -0.5]
    [*texts, last] = await chunks(api, "completions", echo=True, max_tokens=0)
    assert "".join(chunk["choices"][0]["text"] for chunk in [*texts, last]) == "Hello there"
    assert last["choices"][0]["finish_reason"] == "length"
    chat = await ask(api, "chat/completions", max_tokens=0, prompt_logprobs=0)
    assert (chat["choices"][0]["message"]["content"], chat["usage"]["completion_tokens"]) == ("", 0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert (await ask(api, "completions", max_tokens=2))["choices"][0]["text"] == "Paris is"


async def test_zero_alternatives_are_the_sampled_tokens_own(api: Api) -> None:
    [choice] = (await ask(api, "completions", max_tokens=2, logprobs=0))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"Paris": -0.5}, {" is": -0.5}]


@PATHS
async def test_a_prompt_is_cut_at_its_front(api: Api, path: str) -> None:
    await ask(api, path)
    whole = api.service.requests[-1].prompt_token_ids
    await ask(api, path, truncate_prompt_tokens=2)
    assert api.service.requests[-1].prompt_token_ids == whole[-2:]
    await ask(api, path, truncate_prompt_tokens=500)
    assert api.service.requests[-1].prompt_token_ids == whole


async def test_minus_one_leaves_what_fits(api: Api) -> None:
    prompt = list(range(100, 2500))
    body = {"prompt": prompt, "max_tokens": 48, "truncate_prompt_tokens": -1, "echo": True}
    answer = await api.http.post("/v1/completions", json=body)
    assert list(api.service.requests[-1].prompt_token_ids) == prompt[-2000:]
    [choice] = answer.json()["choices"]
    assert choice["text"].startswith(api.service.tokenizer.decode(prompt[-2000:]))


async def test_bad_words_become_tokens_alone_and_inside_a_text(api: Api) -> None:
    encode = api.service.tokenizer.encode
    await ask(api, "completions", bad_words=["Paris", " the ", "Rumpelstiltskin"], allowed_token_ids=[5, 6])
    [request] = api.service.requests
    assert request.params.allowed_token_ids == (5, 6)
    words = set(request.params.bad_words)
    assert {tuple(encode("Paris")), tuple(encode(" Paris")), tuple(encode(" the ".lstrip()))} <= words
    assert tuple(encode("Rumpelstiltskin")) in words


async def test_an_answer_goes_on_where_the_client_has_begun_it(api: Api) -> None:
    begun = [*ASK, {"role": "assistant", "content": "The capital of France,"}]
    await ask(api, "chat/completions", messages=begun, continue_final_message=True)
    await ask(api, "chat/completions", messages=begun, continue_final_message=True, add_generation_prompt=False)
    first, second = api.service.requests
    asked = api.service.tokenizer.decode(api.service.tokenizer.apply_chat_template(ASK))
    assert api.service.tokenizer.decode(first.prompt_token_ids) == asked + "The capital of France,"
    assert second.prompt_token_ids == first.prompt_token_ids


async def test_a_prompt_may_end_with_its_last_message(api: Api) -> None:
    await ask(api, "chat/completions", add_generation_prompt=False)
    [request] = api.service.requests
    assert api.service.tokenizer.decode(request.prompt_token_ids).endswith("Capital of France?<|im_end|>\n")


async def test_roles_of_the_templates_own(api: Api) -> None:
    tokenizer = api.service.tokenizer
    await ask(api, "chat/completions", messages=[*ASK, {"role": "critic", "content": "Too short."}])
    assert "<|im_start|>critic\nToo short.<|im_end|>" in tokenizer.decode(api.service.requests[0].prompt_token_ids)


@pytest.mark.parametrize(
    "template",
    [
        # Drops what it does not know; takes it for the user; refuses it.
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ 'A' if m.role == 'assistant' else 'Q' }}: {{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('who?') }}{% endif %}{% endfor %}",
    ],
)
async def test_roles_that_the_template_does_not_write_are_refused(api: Api, template: str) -> None:
    inner = sentencepiece_tokenizer()
    inner.chat_template = template
    api.service.tokenizer = Tokenizer(inner, "sentencepiece")
    body = {"messages": [*ASK, {"role": "critic", "content": "Too short."}]}
    answer = await api.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[1].role")


async def test_a_prompt_may_go_without_the_tokenizers_special_tokens(api: Api) -> None:
    await ask(api, "completions", add_special_tokens=False)
    [request] = api.service.requests
    plain = api.service.tokenizer.encode("Hello there", add_special_tokens=False)
    assert list(request.prompt_token_ids) == plain
