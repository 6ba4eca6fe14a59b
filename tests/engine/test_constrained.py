"""Constrained requests: valid by construction, and bitwise the same whatever happens around them
and to them, on a random model whose vocabulary spells JSON."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app import grammars
from serve_app.core.request import EngineRequest
from serve_app.core.results import FinishReason
from serve_app.core.sampling_params import SamplingParams
from serve_app.grammars.token_set import Vocabulary
from serve_app.model.loader import from_module
from serve_app.model.paged_model import PagedModel
from serve_app.model.sampling import grammar_masks
from serve_app.model.token_samplers import DeviceSampler
from serve_app.text.message_parser import MessageParser
from serve_app.text.parts import Kind
from serve_app.text.tool_format import ReasoningFormat, Thinking, ToolFormat
from serve_app.text.tool_grammar import CallableTool, Calls, message_grammar
from tests.engine.harness import Harness, Outcome, Run
from tests.examples import examples
from tests.grammars.schemas import bounded_schemas
from tests.models import VOCAB_SIZE, tiny_model

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the sampling kernels need Triton")
EOS = 1
_PIECES = [
    '{"',
    '": ',
    ', "',
    '"}',
    '", "',
    "true",
    "false",
    "null",
    "name",
    "count",
    "tags",
    "10",
    "[",
    "]]",
    "}}",
    " ",
]


def _tokens() -> list[bytes]:
    """0 and 1 are control tokens, then every printable character, then pieces of several, then
    bytes of no text."""
    texts = [chr(code) for code in range(0x20, 0x7F)] + _PIECES
    tokens = [b"<pad>", b"<eos>", *(text.encode() for text in texts)]
    return tokens + [bytes([0x80 + i]) for i in range(VOCAB_SIZE - len(tokens))]


TOKENS = _tokens()
VOCABULARY = Vocabulary(TOKENS, frozenset({0, EOS}), lambda text: [2 + ord(char) - 0x20 for char in text])
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
PROMPT = (20, 30, 40, 50, 60, 70, 80)
TOOLS = ToolFormat('<call>{"name": "', '", "arguments": ', "}</call>", separator=None)
THINKING = Thinking(ReasoningFormat("<think>", "</think>"), begun=True)
CALLS = Calls(TOOLS, [CallableTool("order", ORDER, "tools[0]")], required=True, several=False)
GRAMMARS = {
    "tool call": message_grammar(CALLS, None, None, {}),
    "order": grammars.json_schema(ORDER),
    "choice": grammars.choice(["red apple", "red pear", "green"]),
    "regex": grammars.regex("[0-9]{3}-[a-f]{2,8}"),
    "thinking": message_grammar(None, grammars.json_schema(ORDER), THINKING, {}),
}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=80, grammar=GRAMMARS["order"], logprobs=2),
    "sampled": SamplingParams(seed=3, max_tokens=80, grammar=GRAMMARS["order"]),
    "top-k": SamplingParams(seed=4, max_tokens=80, top_k=5, top_p=0.9, grammar=GRAMMARS["regex"], logprobs=0),
    "penalties": SamplingParams(seed=5, max_tokens=80, repetition_penalty=1.3, grammar=GRAMMARS["regex"]),
    "tool call": SamplingParams(seed=13, max_tokens=120, grammar=GRAMMARS["tool call"], logprobs=0),
    "thinking": SamplingParams(
        seed=14, max_tokens=120, grammar=GRAMMARS["thinking"], thinking_budget=THINKING.bounded(9), logprobs=0
    ),
    "three choices": SamplingParams(seed=6, n=3, max_tokens=80, grammar=GRAMMARS["choice"]),
}
Signature = list[tuple[list[int], list[object], object]]


@pytest.fixture(scope="module")
def model() -> PagedModel:
    return from_module(tiny_model("llama", torch.float32), max_model_len=128)


def text_of(token_ids: Sequence[int]) -> str:
    return b"".join(TOKENS[token_id] for token_id in token_ids if token_id != EOS).decode()


def subjects() -> list[EngineRequest]:
    return [EngineRequest(name, PROMPT, params) for name, params in PARAMS.items()]


def crowd(count: int) -> list[EngineRequest]:
    """Others, every second one free."""
    requests = []
    for i in range(count):
        grammar = GRAMMARS["regex"] if i % 2 else None
        params = SamplingParams(seed=i, max_tokens=6 + 3 * i, grammar=grammar)
        requests.append(EngineRequest(f"crowd {i}", (*PROMPT[: i % 7], 90 + i), params))
    return requests


def signature(run: Run, name: str) -> Signature:
    outcomes = sorted(run.outcomes.items())
    return [(o.token_ids, list(o.logprobs), o.finish_reason) for (request_id, _), o in outcomes if request_id == name]


@pytest.fixture(scope="module")
def alone(model: PagedModel) -> dict[str, Signature]:
    found = {}
    for request in subjects():
        harness = Harness(model, vocabulary=VOCABULARY, speculation="off", enable_prefix_cache=False)
        found[request.request_id] = signature(harness.run([request]), request.request_id)
    return found


def check(run: Run, alone: dict[str, Signature]) -> None:
    for name, expected in alone.items():
        assert signature(run, name) == expected, name


def check_valid(outcome: Outcome, schema: dict[str, Any]) -> None:
    if outcome.finish_reason is FinishReason.STOP:
        jsonschema.validate(json.loads(text_of(outcome.token_ids)), schema)


def test_outputs_match_their_grammars(alone: dict[str, Signature]) -> None:
    for name in ("greedy", "sampled"):
        token_ids, _, reason = alone[name][0]
        assert reason is FinishReason.STOP
        jsonschema.validate(json.loads(text_of(token_ids)), ORDER)
    token_ids, _, reason = alone["tool call"][0]
    assert reason is FinishReason.STOP
    parser = MessageParser(TOOLS, {"order": ORDER})
    parts = parser.feed(text_of(token_ids)) + parser.finish()
    assert parts[0].kind is Kind.CALL
    assert parts[0].text == "order"
    jsonschema.validate(json.loads(parts[1].text), ORDER)
    token_ids, close = alone["thinking"][0][0], VOCABULARY.encode("</think>")
    assert token_ids[9 : 9 + len(close)] == close
    _, _, answer = text_of(token_ids).partition("</think>")
    jsonschema.validate(json.loads(answer), ORDER)
    assert {text_of(ids) for ids, _, _ in alone["three choices"]} <= {"red apple", "red pear", "green"}


@pytest.mark.parametrize(
    "knobs",
    [
        {"max_num_seqs": 24},
        {"max_num_seqs": 24, "speculation": "off"},
        {"max_num_seqs": 4, "max_num_batched_tokens": 5},
        {"max_num_seqs": 24, "num_blocks": 12},
        {"max_num_seqs": 24, "overlap": "on"},
        {"prefill": "separate", "waiting_served_ratio": 1.2},
    ],
    ids=["crowd", "no speculation", "chunked", "preempted", "overlap", "separate prefill"],
)
def test_neighbours_and_scheduling_change_no_bit(
    model: PagedModel, alone: dict[str, Signature], knobs: dict[str, Any]
) -> None:
    harness = Harness(model, vocabulary=VOCABULARY, **knobs)
    run = harness.run([*crowd(15), *subjects()])
    check(run, alone)
    if "num_blocks" in knobs:
        assert run.num_preemptions


def test_forced_tokens_are_drafts_that_save_steps(model: PagedModel, alone: dict[str, Signature]) -> None:
    request = EngineRequest("greedy", PROMPT, PARAMS["greedy"])
    run = Harness(model, vocabulary=VOCABULARY).run([request])
    assert signature(run, "greedy") == alone["greedy"]
    assert len(run.records) < len(alone["greedy"][0][0])
    saved = sum(record.num_forced_tokens for record in run.records)
    assert 0 < saved <= sum(record.num_accepted_tokens for record in run.records)
    assert sum(record.mask_s for record in run.records) > 0
    assert all(row.constrained for record in run.records for row in record.rows)


def test_a_request_continued_at_any_token_goes_on_the_same(model: PagedModel, alone: dict[str, Signature]) -> None:
    for name in ("greedy", "top-k", "tool call", "thinking", "three choices"):
        params = PARAMS[name]
        longest = max(len(ids) for ids, _, _ in alone[name])
        for cut in range(1, longest):
            prior = tuple(tuple(ids[:cut]) for ids, _, _ in alone[name])
            request = EngineRequest(name, PROMPT, params, prior_output_ids=prior)
            run = Harness(model, vocabulary=VOCABULARY).run([request])
            for (ids, _, reason), before, (_, outcome) in zip(
                alone[name], prior, sorted(run.outcomes.items()), strict=True
            ):
                assert [*before, *outcome.token_ids] == ids
                assert outcome.finish_reason is reason


def test_an_earlier_output_that_the_grammar_refuses_ends_that_request_alone(model: PagedModel) -> None:
    wrong = EngineRequest("wrong", PROMPT, PARAMS["greedy"], prior_output_ids=((60, 61),))
    run = Harness(model, vocabulary=VOCABULARY).run([wrong, *crowd(3)])
    assert run.outcomes["wrong", 0].finish_reason is FinishReason.ERROR
    assert "grammar" in (run.outcomes["wrong", 0].error or "")
    assert all(run.outcomes[f"crowd {i}", 0].finish_reason is not FinishReason.ERROR for i in range(3))


def test_a_grammar_that_gets_too_much_work_ends_that_request_alone(model: PagedModel) -> None:
    hostile = 'start: a\na: a b | b\nb: a a | "x" a'  # `grammars.lark` refuses it
    params = replace(PARAMS["sampled"], grammar=hostile)
    run = Harness(model, vocabulary=VOCABULARY).run([EngineRequest("hostile", PROMPT, params), *crowd(3)])
    assert run.outcomes["hostile", 0].finish_reason is FinishReason.ERROR
    assert all(run.outcomes[f"crowd {i}", 0].finish_reason is not FinishReason.ERROR for i in range(3))


def on_device(model: PagedModel) -> DeviceSampler:
    """The sampling kernels, whose tokens the host reads a step late."""
    from serve_app.model.gpu.sampling import choose

    return DeviceSampler(
        model.executor,
        model.eos_token_ids,
        lambda hidden, parameters: choose(model.compute_logits(hidden), parameters),
    )


def streams(count: int, max_tokens: int) -> list[EngineRequest]:
    """As many tokens each: two plain ones, one with a grammar that forces nothing, one with a bad
    word, and so on."""
    kinds: list[dict[str, Any]] = [
        {"ignore_eos": True},
        {"grammar": grammars.regex("[a-z]{400,500}")},
        {"ignore_eos": True},
        {"ignore_eos": True, "bad_words": ((40, 41),)},
    ]
    return [
        EngineRequest(f"r{i}", (*PROMPT[:3], 90 + i), SamplingParams(seed=i, max_tokens=max_tokens, **kinds[i % 4]))
        for i in range(count)
    ]


@pytest.mark.parametrize("sampler", ["host", pytest.param("device", marks=needs_triton)])
def test_constrained_streams_keep_their_pace_beside_plain_ones_under_overlap(
    model: PagedModel, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token in every step, though what they may sample follows from a token in flight."""
    tokens = 50 if sampler == "host" else 20
    workload = streams(4, tokens)
    # as on a machine that has nothing else to do
    monkeypatch.setattr(grammar_masks, "_PATIENCE_S", 60.0)
    expected = Harness(model, vocabulary=VOCABULARY, overlap="off", speculation="off").run(workload)
    if sampler == "device":
        monkeypatch.setattr(model, "_sampler", on_device(model))
    run = Harness(model, vocabulary=VOCABULARY, overlap="on").run(workload)
    assert {key: outcome.token_ids for key, outcome in run.outcomes.items()} == {
        key: outcome.token_ids for key, outcome in expected.outcomes.items()
    }
    assert len(run.records) == len(expected.records) == tokens
    assert all(len(record.rows) == 4 for record in run.records)
    assert all(row.token_in_flight for record in run.records[1:] for row in record.rows)


def test_masks_that_come_late_change_no_bit_under_overlap(
    model: PagedModel, alone: dict[str, Signature], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows sit out again and again, before and while a later step is planned."""
    monkeypatch.setattr(grammar_masks, "_PATIENCE_S", 0.0)
    harness = Harness(model, vocabulary=VOCABULARY, max_num_seqs=24, overlap="on")
    late: list[frozenset[int]] = []
    sit_out = harness.core._scheduler.sit_out
    monkeypatch.setattr(
        harness.core._scheduler, "sit_out", lambda output, rows: (late.append(rows), sit_out(output, rows))
    )
    check(harness.run([*crowd(6), *subjects()]), alone)
    assert late


@given(
    names=st.lists(st.sampled_from(sorted(PARAMS)), min_size=1, max_size=4, unique=True),
    others=st.integers(0, 6),
    patience_s=st.sampled_from([0.0, 60.0]),
    knobs=st.fixed_dictionaries(
        {
            "max_num_seqs": st.sampled_from([2, 5]),
            "max_num_batched_tokens": st.sampled_from([5, 64]),
            "num_blocks": st.sampled_from([12, 64]),
            "speculation": st.sampled_from(["auto", "off"]),
            "prefill": st.sampled_from(["fused", "separate"]),
        }
    ),
)
@settings(max_examples=examples(20))
def test_overlap_changes_no_bit_whatever_happens(
    model: PagedModel,
    alone: dict[str, Signature],
    names: list[str],
    others: int,
    patience_s: float,
    knobs: dict[str, Any],
) -> None:
    workload = [*crowd(others), *(EngineRequest(name, PROMPT, PARAMS[name]) for name in names)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_masks, "_PATIENCE_S", patience_s)
        run = Harness(model, vocabulary=VOCABULARY, overlap="on", **knobs).run(workload)
    check(run, {name: alone[name] for name in names})


@pytest.mark.parametrize("num_steps", range(1, 8))
def test_a_constrained_request_is_aborted_with_its_sampling_in_flight(
    model: PagedModel, alone: dict[str, Signature], num_steps: int
) -> None:
    harness = Harness(model, vocabulary=VOCABULARY, overlap="on")
    core = harness.core
    for name in ("sampled", "top-k"):
        core.add(EngineRequest(f"gone {name}", PROMPT, PARAMS[name]))
    for _ in range(num_steps):
        core.step()
    for name in ("sampled", "top-k"):
        core.abort(f"gone {name}")
    while core.has_unfinished:
        core.step()
    core.check_invariants()
    assert core.stats().blocks_used == 0
    assert signature(harness.run([EngineRequest("top-k", PROMPT, PARAMS["top-k"])]), "top-k") == alone["top-k"]


@given(schema=bounded_schemas(), seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 1.0, 2.0]))
@settings(max_examples=examples(60))
def test_random_schemas_and_logits_give_valid_output(
    model: PagedModel, schema: dict[str, Any], seed: int, temperature: float
) -> None:
    params = SamplingParams(seed=seed, temperature=temperature, grammar=grammars.json_schema(schema))
    outcome = Harness(model, vocabulary=VOCABULARY).run([EngineRequest("r", PROMPT, params)]).outcomes["r", 0]
    assert outcome.finish_reason is FinishReason.STOP
    check_valid(outcome, schema)
