"""Completions with a `suffix`: the marks of each family of models, around what is given."""

from collections.abc import AsyncIterator

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from serve_app.api.admission import AsyncAdmissionQueue
from serve_app.text.tokenizer import Tokenizer
from tests.api.conftest import Api, build_api
from tests.api.services import ScriptedService

MARKS = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
]


@pytest.fixture(params=MARKS, ids=lambda marks: str(marks[0]))
async def filling(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> AsyncIterator[tuple[Api, list[str]]]:
    """An API whose tokenizer has these marks, and begins texts with a token of its own; and the
    marks."""
    backend = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str())
    backend.add_special_tokens([*request.param])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", backend.token_to_id("<|im_start|>"))]
    )
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>")
    built = build_api(ScriptedService(Tokenizer(inner, "filling")), AsyncAdmissionQueue(4, 2))
    async with built.http:
        yield built, [*request.param]


async def test_the_gap_is_asked_for(filling: tuple[Api, list[str]]) -> None:
    api, (before, behind, answer) = filling
    body = {"model": "scripted", "prompt": "def add(a, b):\n    return", "suffix": "\n\nprint(add(1, 2))"}
    told = await api.http.post("/v1/completions", json=body)
    assert told.json()["choices"][0]["text"] == "Paris is the capital of France."
    asked = api.service.tokenizer.decode(api.service.requests[-1].prompt_token_ids)
    assert asked == f"<|im_start|>{before}{body['prompt']}{behind}{body['suffix']}{answer}"
    ids = api.service.tokenizer.encode("x", add_special_tokens=False)
    assert (await api.http.post("/v1/completions", json={"prompt": ids, "suffix": "y"})).status_code == 200
    assert api.service.tokenizer.decode(api.service.requests[-1].prompt_token_ids) == f"{before}x{behind}y{answer}"
    for more in ({"echo": True}, {"truncate_prompt_tokens": 5}):
        refused = await api.http.post("/v1/completions", json={**body, **more})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")


async def test_other_models_refuse_it(api: Api) -> None:
    refused = await api.http.post("/v1/completions", json={"prompt": "a", "suffix": "b"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")
    assert (await api.http.post("/v1/completions", json={"prompt": "a", "suffix": ""})).status_code == 200
