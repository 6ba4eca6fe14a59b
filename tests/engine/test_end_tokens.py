"""Which tokens end a text: those of config, generation config, tokenizer and chat template
together."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoTokenizer

from load_tests.llama_cpp_ids.headers import write_header
from load_tests.random_gguf import write_gguf
from serve_app.api.admission import AsyncAdmissionQueue
from serve_app.checkpoints.model_files import locate_model
from serve_app.core.results import FinishReason
from serve_app.core.sampling_params import SamplingParams
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.engine.llm import LLM
from serve_app.errors import ConfigError, InvalidRequestError
from serve_app.grammars import choice
from serve_app.model.options import ModelOptions
from serve_app.text.tokenizer import load_tokenizer
from tests.api.conftest import build_api
from tests.api.services import EngineService
from tests.engine.streams import StreamEngine
from tests.models import tiny_model

pytestmark = pytest.mark.wide

TEXT_END, TURN_BEGIN, TURN_END = 0, 1, 2
"""<|endoftext|>, <|im_start|> and <|im_end|> of the default model's vocabulary."""
OTHER = 3
WIDTH = 49152
SHAPE = {
    "model_type": "llama",
    "vocab_size": WIDTH,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10_000.0},
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def module() -> Any:
    """Random weights; as wide as the default model's vocabulary."""
    return tiny_model("llama", torch.float32, vocab_size=WIDTH)


def save(
    folder: Path, module: Any, *, config: Any = None, generation: Any = None, eos: str | None = None, template: bool
) -> Path:
    """A model's folder whose files name these ends. config, generation: their `eos_token_id`; "" is
    not there."""
    module.save_pretrained(folder)
    load_tokenizer("default")._tokenizer.save_pretrained(folder)
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        content = json.loads((folder / name).read_text())
        content["eos_token_id"] = value
        if value == "":
            del content["eos_token_id"]
        (folder / name).write_text(json.dumps(content))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": eos}))
    if not template:
        (folder / "chat_template.jinja").unlink()
    return folder


def open_llm(folder: Path) -> LLM:
    return LLM(str(folder), max_model_len=256, kv_cache_gib=0.05, max_num_seqs=4, max_num_batched_tokens=64)


def reason_after(llm: LLM, token_id: int, **params: Any) -> FinishReason | None:
    """How an answer ends whose every token is this one, if it may."""
    asked = SamplingParams(temperature=0.0, max_tokens=4, logit_bias=((token_id, 100.0),), **params)
    [result] = llm.generate([[504, 3575]], asked)
    return result.outputs[0].finish_reason


@pytest.mark.parametrize(
    ("config", "generation", "eos", "template", "expected"),
    [
        (TEXT_END, TEXT_END, "<|im_end|>", False, {TEXT_END, TURN_END}),
        (TEXT_END, TEXT_END, "<|endoftext|>", True, {TEXT_END, TURN_END}),
        (OTHER, TEXT_END, "<|endoftext|>", False, {OTHER, TEXT_END}),
        (None, None, "<|im_end|>", False, {TURN_END}),
        (None, None, None, True, {TURN_END}),
        (TEXT_END, [TEXT_END, OTHER], None, False, {TEXT_END, OTHER}),
        # What transformers' class has, 2 for a Llama, is no end that these files state.
        ("", "", "<|endoftext|>", False, {TEXT_END}),
    ],
)
def test_any_of_the_ends_that_the_files_state_ends_a_text(
    tmp_path: Path, module: Any, config: Any, generation: Any, eos: str | None, template: bool, expected: set[int]
) -> None:
    folder = save(tmp_path / "model", module, config=config, generation=generation, eos=eos, template=template)
    with open_llm(folder) as llm:
        assert set(llm.core.info.eos_token_ids) == expected
        for token_id in range(4):
            ended = FinishReason.STOP if token_id in expected else FinishReason.LENGTH
            assert reason_after(llm, token_id) is ended
            assert reason_after(llm, token_id, ignore_eos=True) is FinishReason.LENGTH
            assert reason_after(llm, token_id, min_tokens=4) is FinishReason.LENGTH


def test_constrained_output_ends_though_the_configuration_names_no_end(tmp_path: Path, module: Any) -> None:
    folder = save(tmp_path / "model", module, eos="<|im_end|>", template=False)
    with open_llm(folder) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=9, grammar=choice(["yes", "no"]))
        [result] = llm.generate([[504, 3575]], params)
        assert result.outputs[0].text in ("yes", "no")
        assert result.outputs[0].finish_reason is FinishReason.STOP
        assert len(llm.odds("Well?", ["yes", "no"])) == 2


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    tokenizer = load_tokenizer(str(folder))
    model = ModelOptions(str(folder), max_model_len=256, end_ids=tokenizer.end_ids)
    config = EngineConfig(model=model, max_num_batched_tokens=64, kv_cache_gib=0.05)
    engine = await StreamEngine.start_with(lambda: EngineCore.load(config, vocabulary=tokenizer.vocabulary))
    tokenizer.check_fits(engine.info.vocab_size)
    api = build_api(EngineService(engine, tokenizer, []), AsyncAdmissionQueue(4, 2))
    async with api.http:
        yield api.http
    await engine.shutdown()


async def test_without_any_end_constrained_requests_are_refused_by_name(tmp_path: Path, module: Any) -> None:
    folder = save(tmp_path / "model", module, template=True)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    async with served(folder) as http:
        assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
        for field in (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"choice": ["yes", "no"]}},
            {"structured_outputs": {"choice": ["yes", "no"], "odds": True}},
        ):
            refused = await http.post("/v1/chat/completions", json=chat | field)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "grammar_unsupported")
            assert "nor its tokenizer defines an end token" in refused.json()["error"]["message"]
    with open_llm(folder) as llm, pytest.raises(InvalidRequestError, match="nor its tokenizer defines an end token"):
        llm.odds("Well?", ["yes", "no"])


async def test_an_added_token_beyond_the_logits_is_refused_where_it_is_used(tmp_path: Path, module: Any) -> None:
    """As in Gemma 3's tokenizer, which has one for images."""
    folder = save(tmp_path / "model", module, config=TURN_END, template=True)
    inner = AutoTokenizer.from_pretrained(folder)
    inner.add_tokens(["<image_soft_token>"], special_tokens=True)
    inner.save_pretrained(folder)
    async with served(folder) as http:
        for prompt in ("see <image_soft_token>", [504, WIDTH]):
            refused = await http.post("/v1/completions", json={"prompt": prompt})
            assert refused.status_code == 400
            assert refused.json()["error"]["message"] == f"`prompt` must contain token ids from 0 to 49151, got {WIDTH}"
        refused = await http.post("/v1/embeddings", json={"input": "<image_soft_token>"})
        assert (refused.status_code, str(WIDTH) in refused.text) == (400, True)
        # In a message it is text, as every control token is.
        body = {"messages": [{"role": "user", "content": "<image_soft_token>"}], "max_tokens": 2}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        body |= {"structured_outputs": {"choice": ["<image_soft_token>"]}, "max_tokens": 32}
        answered = await http.post("/v1/chat/completions", json=body)
        assert answered.json()["choices"][0]["message"]["content"] == "<image_soft_token>"
    with pytest.raises(ConfigError, match="the tokenizer has 49152 ids, but the model has only 49151 logits"):
        load_tokenizer(str(folder)).check_fits(WIDTH - 1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"eos_token_id": TEXT_END}, {TEXT_END, TURN_END}),
        ({"eos_token_id": TEXT_END, "eot_token_id": TURN_END, "chat_template": None}, {TEXT_END, TURN_END}),
        ({"eos_token_id": TEXT_END, "eom_token_id": OTHER, "chat_template": None}, {TEXT_END, OTHER}),
        ({"eos_token_id": TEXT_END, "chat_template": None}, {TEXT_END}),
    ],
    ids=["template", "end of turn", "end of message", "a base model"],
)
def test_a_gguf_file_s_ends(tmp_path: Path, changes: dict[str, Any], expected: set[int]) -> None:
    default = locate_model("default").path
    assert default is not None
    keys = {f"tokenizer.{'' if name == 'chat_template' else 'ggml.'}{name}": value for name, value in changes.items()}
    header = write_header(tmp_path / "header.gguf", default, keys)
    path = write_gguf(tmp_path / "small.gguf", SHAPE, lambda *_: Kind.F16, tokenizer=header)
    with open_llm(path) as llm:
        assert set(llm.core.info.eos_token_ids) == expected
        for token_id in range(4):
            ended = FinishReason.STOP if token_id in expected else FinishReason.LENGTH
            assert reason_after(llm, token_id) is ended
