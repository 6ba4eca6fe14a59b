"""`structured_outputs.odds`: the probability of every allowed answer, and what it costs."""

import math
from typing import Any

import openai
import pytest
import torch

from serve_app.text.tokenizer import Tokenizer
from tests.api.conftest import Api, babbler_module

ANSWERS = ["yes", "no", "a red apple", "yes, of course", "Ελλάδα"]
PROMPT = "Once upon a time, there was a question that nobody had asked yet. Was it a good one?"


def expected_odds(tokenizer: Tokenizer, prompt: list[int], answers: list[str]) -> list[tuple[float, float]]:
    """(log-probability, probability) of each answer and the end behind it, by transformers."""
    module, sums = babbler_module(), []
    for answer in answers:
        ids = [*tokenizer.encode(answer, add_special_tokens=False), 2]
        with torch.inference_mode():
            logprobs = module(torch.tensor([prompt + ids])).logits[0].double().log_softmax(-1)
        sums.append(sum(float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(ids)))
    weights = torch.tensor(sums, dtype=torch.float64).softmax(0).tolist()
    return list(zip(sums, weights, strict=True))


def check(told: list[dict[str, Any]], expected: list[tuple[float, float]], answers: list[str]) -> None:
    assert [entry["answer"] for entry in told] == answers
    for entry, (logprob, probability) in zip(told, expected, strict=True):
        assert entry["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert entry["probability"] == pytest.approx(probability, abs=1e-4)
    assert math.fsum(entry["probability"] for entry in told) == pytest.approx(1)


@pytest.mark.wide
async def test_odds_are_those_of_transformers_on_both_endpoints(live: Api, tokenizer: Tokenizer) -> None:
    wanted = {"structured_outputs": {"choice": [*ANSWERS, "no"], "odds": True}}
    body = {"prompt": [PROMPT, PROMPT[:40]], "n": 2, "seed": 1, "max_tokens": 20, **wanted}
    plain = (await live.http.post("/v1/completions", json=body)).raise_for_status().json()
    for i, choice in enumerate(plain["choices"]):
        prompt = tokenizer.encode(body["prompt"][i // 2])
        check(choice["odds"], expected_odds(tokenizer, prompt, ANSWERS), ANSWERS)
    messages = [{"role": "user", "content": PROMPT}]
    chat = (await live.http.post("/v1/chat/completions", json={"messages": messages, "seed": 1, **wanted})).json()
    [choice] = chat["choices"]
    assert choice["message"]["content"] in ANSWERS
    prompt = tokenizer.apply_chat_template(messages)
    check(choice["odds"], expected_odds(tokenizer, prompt, ANSWERS), ANSWERS)
    # The prompt counts once, each answer's tokens (with its end) once.
    scored = sum(len(tokenizer.encode(answer, add_special_tokens=False)) + 1 for answer in ANSWERS)
    assert chat["usage"]["prompt_tokens"] == len(prompt) + scored
    assert [charge[2] for charge in live.observer.charges] == [
        plain["usage"]["prompt_tokens"],
        chat["usage"]["prompt_tokens"],
    ]


async def test_the_prompt_is_computed_once(live: Api) -> None:
    """All but the rest of a block of it comes out of the prefix cache, however many answers there
    are."""
    answers = [f"answer {i}" for i in range(20)]
    body = {"prompt": list(range(100, 420)), "max_tokens": 8, "seed": 1}
    told = await live.http.post(
        "/v1/completions", json={**body, "structured_outputs": {"choice": answers, "odds": True}}
    )
    assert len(told.json()["choices"][0]["odds"]) == 20
    assert 320 < sum(record.num_prefill_tokens for record in live.service.records) < 320 + 20 * 24


@pytest.mark.parametrize(
    ("wanted", "param", "said"),
    [
        ({"regex": "a"}, "structured_outputs.odds", "requires `choice`"),
        ({"choice": [str(i) for i in range(129)]}, "structured_outputs.choice", "at most 128"),
        ({"choice": ["a", "b " * 3000]}, "structured_outputs.choice", "context of 2048"),
        ({"choice": [f"{i} " * 600 for i in range(120)]}, "structured_outputs.choice", "at most 65536"),
    ],
)
async def test_what_is_too_much_is_refused_by_name(api: Api, wanted: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await api.openai.completions.create(
            model="scripted", prompt="x", extra_body={"structured_outputs": {**wanted, "odds": True}}
        )
    assert refused.value.param == param
    assert said in refused.value.message


async def test_odds_do_not_go_with_streams_and_tools(api: Api) -> None:
    odds = {"structured_outputs": {"choice": ["a"], "odds": True}, "messages": [{"role": "user", "content": "x"}]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    for other in ({"stream": True}, {"tools": tools}):
        answer = await api.http.post("/v1/chat/completions", json={**odds, **other})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] in ("structured_outputs.odds", "tools")
