"""The wire formats, read by the `openai` client. The service is scripted: each answer is known to
the byte."""

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from tokenizers.processors import TemplateProcessing

from serve_app.api.request_events import Outcome
from serve_app.errors import EngineError, UnavailableError
from serve_app.text.tokenizer import Tokenizer
from tests.api.conftest import Api
from tests.sentencepiece import sentencepiece_tokenizer

ASK: list[Any] = [{"role": "user", "content": "Capital of France?"}]
REPLY = "Paris is the capital of France."


async def test_chat_whole(api: Api) -> None:
    answer = await api.openai.chat.completions.create(model="scripted", messages=ASK, n=2)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model, answer.system_fingerprint) == ("chat.completion", "scripted", "fp_scripted")
    assert [(c.index, c.message.role, c.message.content, c.finish_reason) for c in answer.choices] == [
        (i, "assistant", REPLY, "stop") for i in (0, 1)
    ]
    prompt = len(api.service.tokenizer.apply_chat_template(ASK))
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, 16, prompt + 16)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 1


async def test_chat_stream(api: Api) -> None:
    stream = await api.openai.chat.completions.create(
        model="scripted", messages=ASK, n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks: list[ChatCompletionChunk] = [chunk async for chunk in stream]
    assert len({(chunk.id, chunk.created, chunk.object) for chunk in chunks}) == 1
    for index in (0, 1):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
        assert "".join(choice.delta.content or "" for choice in mine) == REPLY
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert len(mine) == 1 + 8  # the role, then one event per token
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 16


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_chunks_tell_the_tokens_so_far_where_that_is_asked_for(api: Api, path: str) -> None:
    asked = {"messages": ASK} if path.startswith("chat") else {"prompt": "a"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await api.http.post(
        f"/v1/{path}", json={**asked, "stream": True, "max_tokens": 3, "stream_options": options}
    )
    usages = [json.loads(event.removeprefix("data: "))["usage"] for event in answer.text.split("\n\n")[:-2]]
    told = [usage["completion_tokens"] for usage in usages]
    assert told == sorted(told)
    assert set(told) == {1, 2, 3}
    assert usages[-1] == usages[-2]
    assert {usage["total_tokens"] - usage["completion_tokens"] for usage in usages} == {usages[0]["prompt_tokens"]}


async def test_stream_bytes(api: Api) -> None:
    answer = await api.http.post("/v1/chat/completions", json={"messages": ASK, "stream": True, "max_tokens": 2})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, end, nothing = answer.text.split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    deltas = [json.loads(e.removeprefix("data: "))["choices"][0] for e in events]
    assert [d["delta"] for d in deltas] == [
        {"role": "assistant", "content": ""},
        {"content": "Paris"},
        {"content": " is"},
    ]
    assert deltas[-1]["finish_reason"] == "length"
    assert "usage" not in json.loads(events[0].removeprefix("data: "))


async def test_chat_logprobs_streamed_and_whole_agree(api: Api) -> None:
    asked: dict[str, Any] = {"model": "scripted", "messages": ASK, "logprobs": True, "top_logprobs": 2}
    whole = (await api.openai.chat.completions.create(**asked)).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert "".join(token.token for token in whole.content) == REPLY
    assert bytes(b for token in whole.content for b in token.bytes or ()).decode() == REPLY
    assert [len(token.top_logprobs) for token in whole.content] == [2] * 7
    assert whole.content[0].top_logprobs[0].logprob == whole.content[0].logprob == -0.5
    streamed = []
    async for chunk in await api.openai.chat.completions.create(**asked, stream=True):
        if (logprobs := chunk.choices[0].logprobs) is not None:
            streamed += logprobs.content or []
    assert streamed == whole.content


async def test_completion_whole_with_echo_and_logprobs(api: Api) -> None:
    answer = await api.openai.completions.create(
        model="scripted", prompt="Hello there", echo=True, logprobs=1, max_tokens=2
    )
    [choice] = answer.choices
    assert (answer.object, choice.text, choice.finish_reason) == ("text_completion", "Hello thereParis is", "length")
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["Hello", " there", "Paris", " is"]
    assert logprobs.text_offset == [0, 5, 11, 16]
    assert logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
    assert logprobs.top_logprobs == [None, {" there": -0.5}, {"Paris": -0.5}, {" is": -0.5}]


async def test_completion_stream_with_echo_and_logprobs(api: Api) -> None:
    hello = api.service.tokenizer.encode("Hello there")
    asked: dict[str, Any] = {
        "model": "scripted", "prompt": [hello, [17, 18]], "echo": True, "logprobs": 0, "max_tokens": 3, "n": 2,
    }  # fmt: skip
    whole = {c.index: c for c in (await api.openai.completions.create(**asked)).choices}
    assert [whole[i].text for i in range(4)] == ["Hello thereParis is the"] * 2 + ['!"Paris is the'] * 2
    texts, tokens, offsets = [""] * 4, [[] for _ in range(4)], [[] for _ in range(4)]
    async for chunk in await api.openai.completions.create(**asked, stream=True):
        [choice] = chunk.choices
        assert choice.logprobs is not None
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.tokens or []
        offsets[choice.index] += choice.logprobs.text_offset or []
    for i in range(4):
        logprobs = whole[i].logprobs
        assert logprobs is not None
        assert (texts[i], tokens[i], offsets[i]) == (whole[i].text, logprobs.tokens, logprobs.text_offset)
        assert logprobs.top_logprobs is not None
        assert [len(top or {}) for top in logprobs.top_logprobs] == [0] + [1] * (len(logprobs.tokens or []) - 1)


@pytest.mark.parametrize("as_ids", [False, True])
async def test_echoed_tokens_are_where_their_offsets_say_special_ones_too(api: Api, as_ids: bool) -> None:
    prompt = "<|im_start|>user\nCaf\u00e9<|im_end|> it is"
    ids = api.service.tokenizer.encode(prompt)
    answer = await api.openai.completions.create(
        model="scripted", prompt=ids if as_ids else prompt, echo=True, logprobs=0, max_tokens=3
    )
    [choice] = answer.choices
    assert choice.text == prompt + "Paris is the"
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
    assert tokens is not None
    assert offsets is not None
    assert len(tokens) == len(ids) + 3
    assert [choice.text[at : at + len(token)] for token, at in zip(tokens, offsets, strict=True)] == tokens


async def test_a_token_that_the_tokenizer_puts_in_front_takes_no_room_in_the_echo(api: Api) -> None:
    plain = sentencepiece_tokenizer()
    plain.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    api.service.tokenizer = Tokenizer(plain, "sentencepiece")
    answer = await api.openai.completions.create(
        model="scripted", prompt="world<s>or", echo=True, logprobs=0, max_tokens=1
    )
    [choice] = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens[:5] == ["<s>", " world", "<s>", "o", "r"]
    assert choice.logprobs.text_offset == [0, 0, 5, 8, 9, 10]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_end_the_answer_and_the_engines_work(api: Api, stream: bool) -> None:
    body = {"messages": ASK, "stop": ["capital", "zzz"], "stream": stream}
    answer = await api.http.post("/v1/chat/completions", json=body)
    if stream:
        events = [json.loads(e.removeprefix("data: ")) for e in answer.text.split("\n\n")[:-2]]
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
        reason = events[-1]["choices"][0]["finish_reason"]
    else:
        [choice] = answer.json()["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == ("Paris is the ", "stop")
    assert api.service.running == 0
    assert api.observer.num_tokens == 4


async def test_stop_string_may_be_shown(api: Api) -> None:
    body = {"prompt": "x", "stop": "capital", "include_stop_str_in_output": True}
    [choice] = (await api.http.post("/v1/completions", json=body)).json()["choices"]
    assert choice["text"] == "Paris is the capital"


async def test_parameters_reach_the_engine(api: Api) -> None:
    body = {
        "prompt": "x", "n": 2, "max_tokens": 9, "min_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 7,
        "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4, "seed": 11,
        "logit_bias": {"5": 1}, "stop_token_ids": [3], "ignore_eos": True, "priority": -1, "cache_salt": "tenant",
    }  # fmt: skip
    assert (await api.http.post("/v1/completions", json=body)).status_code == 200
    [request] = api.service.requests
    assert (request.priority, request.cache_salt) == (-1, "tenant")
    assert request.params.to_wire() == {
        "n": 2, "max_tokens": 9, "min_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1,
        "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4, "seed": 11,
        "logit_bias": ((5, 1.0),), "stop_token_ids": (3,), "ignore_eos": True,
    }  # fmt: skip


async def test_defaults(api: Api) -> None:
    await api.http.post("/v1/completions", json={"prompt": "x"})
    await api.http.post("/v1/chat/completions", json={"messages": ASK})
    await api.http.post("/v1/chat/completions", json={"messages": ASK, "max_completion_tokens": 5})
    text, chat, capped = api.service.requests
    assert text.params.max_tokens == 16
    assert chat.params.max_tokens == 2048 - len(chat.prompt_token_ids)
    assert capped.params.max_tokens == 5
    assert text.params.seed is not None
    assert text.params.seed != chat.params.seed
    assert text.request_id != chat.request_id


async def test_what_every_client_sends_is_accepted(api: Api) -> None:
    answer = await api.openai.chat.completions.create(
        model="scripted",
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
            {"role": "user", "content": "Hi", "name": "ann"},
            {"role": "assistant", "content": "Hello", "refusal": None},
            {"role": "user", "content": "?"},
        ],
        user="someone", metadata={"run": "1"}, store=True, tools=[], tool_choice="auto", parallel_tool_calls=True,
        response_format={"type": "text"}, service_tier="auto", modalities=["text"], prompt_cache_key="k",
        logit_bias={}, stop=None, temperature=None, top_p=None, n=None, seed=None, max_tokens=None, logprobs=False,
        stream=False, stream_options=None, frequency_penalty=0, presence_penalty=0, safety_identifier="s",
    )  # fmt: skip
    assert answer.choices[0].message.content == REPLY
    rendered = api.service.tokenizer.decode(api.service.requests[0].prompt_token_ids)
    assert "<|im_start|>system\nBe\nbrief.<|im_end|>" in rendered


LENIENT = [
    {"skip_special_tokens": True, "length_penalty": 1.0, "echo": False, "verbosity": "medium", "unheard_of": None},
    {"metadata": {"a": 1}, "service_tier": "priority", "client_metadata": {}, "prediction": {"type": "content"}},
    {"max_tokens": 16.0, "top_k": 40.0, "seed": 7.0, "n": 1.0, "stop_token_ids": [3.0]},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [{**ASK[0], "id": "msg_1", "timestamp": 1.5, "annotations": [{"a": 1}], "cache_control": {}}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Capital of France?", "cache_control": {}}]}]},
]


@pytest.mark.parametrize("given", LENIENT, ids=lambda given: "-".join(given))
async def test_what_changes_nothing_is_ignored(api: Api, given: dict[str, Any]) -> None:
    answer = await api.http.post("/v1/chat/completions", json={"messages": ASK, **given})
    assert answer.status_code == 200, answer.text
    [request] = api.service.requests
    assert list(request.prompt_token_ids) == api.service.tokenizer.apply_chat_template(ASK)
    if "seed" in given:
        asked = {"max_tokens": 16, "top_k": 40, "seed": 7, "stop_token_ids": (3,)}
        assert request.params.to_wire() == asked
        assert type(request.params.max_tokens) is int


async def test_an_answer_without_text_may_stand_in_the_history(api: Api) -> None:
    empty = [*ASK, {"role": "assistant", "content": None, "reasoning": "Hm."}, *ASK]
    for history in (empty, [*ASK, {"role": "assistant", "content": "", "reasoning_content": "Hm."}, *ASK]):
        assert (await api.http.post("/v1/chat/completions", json={"messages": history})).status_code == 200
    first, second = api.service.requests
    assert first.prompt_token_ids == second.prompt_token_ids


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_minus_one_asks_for_the_rest_of_the_context(api: Api, path: str) -> None:
    asked = {"messages": ASK} if path.startswith("chat") else {"prompt": "Hello there"}
    assert (await api.http.post(f"/v1/{path}", json={**asked, "max_tokens": -1})).status_code == 200
    [request] = api.service.requests
    assert request.params.max_tokens == 2048 - len(request.prompt_token_ids)


async def test_models_tokens_and_operations(api: Api) -> None:
    [model] = (await api.openai.models.list()).data
    assert (model.id, model.object, model.created) == ("scripted", "model", 1_700_000_000)
    assert (await api.openai.models.retrieve("scripted")).id == "scripted"
    ids = (await api.http.post("/tokenize", json={"prompt": "hello world"})).json()
    assert ids == {"tokens": api.service.tokenizer.encode("hello world"), "count": 2, "max_model_len": 2048}
    assert (await api.http.post("/detokenize", json={"tokens": ids["tokens"]})).json() == {"prompt": "hello world"}
    chat = (await api.http.post("/tokenize", json={"messages": ASK})).json()["tokens"]
    assert chat == api.service.tokenizer.apply_chat_template(ASK)
    for path in ("/health/live", "/health/ready", "/version", "/openapi.json"):
        assert (await api.http.get(path)).status_code == 200
    assert (await api.http.head("/health/ready")).status_code == 200
    metrics = await api.http.get("/metrics")
    assert metrics.text == "serve_app_up 1\n"
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/ping", "/health/live", "/version", "/metrics"])
async def test_head_is_get_without_a_body(api: Api, path: str) -> None:
    got, head = await api.http.get(path), await api.http.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-length"] == str(len(got.content))


async def test_routes_that_other_servers_clients_ask_for(api: Api) -> None:
    assert (await api.http.get("/load")).json() == {"server_load": 0}
    info = (await api.http.get("/tokenizer_info")).json()
    assert (info["eos_token"], info["max_model_len"]) == ("<|im_end|>", 2048)
    assert "<|im_start|>" in info["chat_template"]
    assert (await api.http.get("/models")).json() == (await api.http.get("/v1/models")).json()
    chat = await api.http.post("/chat/completions", json={"messages": ASK})
    assert chat.json()["choices"][0]["message"]["content"] == REPLY
    assert (await api.http.post("/completions", json={"prompt": "x"})).json()["choices"][0]["text"] == REPLY
    api.service.ready = UnavailableError("no replica", retry_after_s=2.5)
    for path in ("/health", "/ping"):
        assert (await api.http.get(path)).status_code == 503


async def test_readiness_is_not_liveness(api: Api) -> None:
    api.service.ready = UnavailableError("no replica", retry_after_s=2.5)
    answer = await api.http.get("/health/ready")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
    assert answer.json()["error"]["code"] == "unavailable"
    assert (await api.http.get("/health/live")).status_code == 200


async def test_an_error_before_the_first_token_has_its_status(api: Api) -> None:
    api.service.error, api.service.error_at = UnavailableError("all replicas are gone", retry_after_s=7), 0
    for stream in (False, True):
        answer = await api.http.post("/v1/chat/completions", json={"messages": ASK, "stream": stream})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert [end[1] for end in api.observer.ended] == [Outcome.FAILED] * 2


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (EngineError("3 engine replicas were lost", code="request_killed_replicas"), 1),
        (EngineError("the engine failed the request"), 1),
        (UnavailableError("no engine replica is running", retry_after_s=0), 2),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_clients_do_not_send_again_what_the_engine_failed_on(
    api: Api, error: Exception, attempts: int, stream: bool
) -> None:
    api.service.error, api.service.error_at = error, 0
    client = api.openai.with_options(max_retries=1)
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="scripted", messages=ASK, stream=stream)
    assert len(api.service.requests) == attempts


@pytest.mark.parametrize(
    ("error", "message"),
    [(EngineError("the engine failed"), "the engine failed"), (RuntimeError("secret /path"), "internal error")],
)
async def test_an_error_in_the_stream_is_told_and_there_is_no_done(api: Api, error: Exception, message: str) -> None:
    api.service.error, api.service.error_at = error, 2
    answer = await api.http.post(
        "/v1/chat/completions", json={"messages": ASK, "stream": True}, headers={"x-request-id": "mine"}
    )
    assert answer.status_code == 200
    last = answer.text.split("\n\n")[-2]
    assert last.startswith("event: error\ndata: ")
    told = json.loads(last.removeprefix("event: error\ndata: "))["error"]
    assert (told["message"], told["request_id"], told["type"]) == (message, "mine", "server_error")
    assert "[DONE]" not in answer.text
    assert "secret" not in answer.text
    assert api.observer.ended[0][1] is Outcome.FAILED
    with pytest.raises(openai.APIError, match=message):
        async for _ in await api.openai.chat.completions.create(model="scripted", messages=ASK, stream=True):
            pass


async def test_an_engine_that_ends_early_is_an_error_not_an_answer(api: Api) -> None:
    api.service.error_at = 3
    answer = await api.http.post("/v1/completions", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
    answer = await api.http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert "event: error" in answer.text
    assert "[DONE]" not in answer.text


async def test_an_unexpected_error_tells_nothing(api: Api) -> None:
    api.service.error, api.service.error_at = RuntimeError("secret /path"), 0
    answer = await api.http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text


async def test_the_observer_hears_of_everything_once(api: Api) -> None:
    await api.http.post("/v1/completions", json={"prompt": "x", "n": 2, "max_tokens": 3})
    await api.http.post("/v1/completions", json={"prompt": 3})
    assert api.observer.begun == 2
    assert api.observer.ended == [("completions", Outcome.COMPLETED, 1, 6), ("completions", Outcome.INVALID, 0, 0)]
    assert (api.observer.first_tokens, api.observer.num_tokens) == (1, 6)
    assert [gap is None for gap in api.observer.gaps] == [True, True, False, False, False, False]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_the_log_probabilities_of_one_answer_are_bounded(api: Api, path: str) -> None:
    asked: dict[str, Any] = {"messages": ASK, "logprobs": True, "top_logprobs": 20}
    if path == "completions":
        asked = {"prompt": "a", "logprobs": 20}
    answer = await api.http.post(f"/v1/{path}", json={**asked, "n": 64, "max_tokens": 512})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
    assert "leaves `max_tokens` 195" in answer.json()["error"]["message"]
    answer = await api.http.post(f"/v1/{path}", json={**asked, "n": 64, "max_tokens": 195})
    assert answer.status_code == 200
    await api.http.post(f"/v1/{path}", json={**asked, "n": 128})
    assert api.service.requests[-1].params.max_tokens == (97 if path != "completions" else 16)
