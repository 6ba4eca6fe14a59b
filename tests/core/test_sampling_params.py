import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
    ThinkingBudget,
)
from serve_app.errors import InvalidRequestError


@pytest.mark.parametrize(("field", "value"), [("min_tokens", 1), ("ignore_eos", True)])
def test_what_a_grammar_decides_is_not_asked_for_beside_it(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field) as refused:
        SamplingParams(grammar="start: /a+/", **{field: value})  # type: ignore[arg-type]
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("n", 0, "from 1 to 128"),
        ("n", 129, "from 1 to 128"),
        ("n", True, "integer"),
        ("max_tokens", 0, "from 1"),
        ("max_tokens", 1.5, "integer"),
        ("min_tokens", -1, "from 0"),
        ("temperature", -0.1, "from 0 to 2"),
        ("temperature", 2.1, "from 0 to 2"),
        ("temperature", math.nan, "from 0 to 2"),
        ("temperature", "1", "number"),
        ("temperature", True, "number"),
        ("top_p", 0.0, "above 0 up to 1"),
        ("top_p", 1.1, "above 0 up to 1"),
        ("top_k", -2, "from -1"),
        ("min_p", 1.1, "from 0 to 1"),
        ("repetition_penalty", 0, "from 0.01 to 10"),
        ("repetition_penalty", 0.0099, "from 0.01 to 10"),
        ("repetition_penalty", math.inf, "from 0.01 to 10"),
        ("presence_penalty", -2.1, "from -2 to 2"),
        ("frequency_penalty", 2.1, "from -2 to 2"),
        ("seed", 2**63, "integer"),
        ("logit_bias", ((-1, 1.0),), "from 0"),
        ("logit_bias", ((1, 101.0),), "from -100 to 100"),
        ("logit_bias", tuple((i, 1.0) for i in range(MAX_LOGIT_BIAS + 1)), f"at most {MAX_LOGIT_BIAS}"),
        ("stop_token_ids", (-1,), "from 0"),
        ("stop_token_ids", tuple(range(MAX_STOP_TOKEN_IDS + 1)), f"at most {MAX_STOP_TOKEN_IDS}"),
        ("allowed_token_ids", (-1,), "from 0"),
        ("allowed_token_ids", tuple(range(MAX_ALLOWED_TOKEN_IDS + 1)), f"at most {MAX_ALLOWED_TOKEN_IDS}"),
        ("bad_words", ((1, -1),), "from 0"),
        ("bad_words", ((),), "words of 1 to"),
        ("bad_words", ((1,) * (MAX_BAD_WORD_TOKENS + 1),), f"words of 1 to {MAX_BAD_WORD_TOKENS}"),
        ("bad_words", ((1,),) * (MAX_BAD_WORDS + 1), f"at most {MAX_BAD_WORDS}"),
        ("grammar", "", "a text of 1 to"),
        ("grammar", "a" * (MAX_GRAMMAR_CHARS + 1), "a text of 1 to"),
        ("thinking_budget", ThinkingBudget(3, "<a>", "</a>"), "needs a `grammar`"),
        ("logprobs", 21, "from 0 to 20"),
        ("prompt_logprobs", -1, "from 0 to 20"),
        ("prompt_logprobs_from", 0, "from 1 to 2147483647"),
        ("pooling", "max", "one of last, mean"),
        ("pooling", "last", "requires `n` 1 and `max_tokens` 1"),
        ("dimensions", 0, "from 1 to 2147483647"),
    ],
)
def test_an_impossible_value_is_refused_with_field_and_limit(field: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param is not None
    assert caught.value.param.split(".")[0] == field
    assert field in caught.value.message
    assert limit in caught.value.message


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequestError, match="at most max_tokens") as caught:
        SamplingParams(min_tokens=4, max_tokens=3)
    assert caught.value.param == "min_tokens"
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3


def test_a_huge_value_is_shown_shortened() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(n=10**400)
    assert len(caught.value.message) < 200


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=0.1).greedy


def test_each_penalty_makes_the_tokens_so_far_count() -> None:
    assert not SamplingParams(frequency_penalty=0, presence_penalty=0, repetition_penalty=1).has_penalties
    for penalty in ({"frequency_penalty": -0.1}, {"presence_penalty": 0.1}, {"repetition_penalty": 1.1}):
        assert SamplingParams(**penalty).has_penalties


@pytest.mark.parametrize(
    ("fields", "edits", "waits"),
    [
        ({}, False, False),
        ({"logit_bias": ((1, 1.0),)}, True, False),
        ({"repetition_penalty": 1.1}, True, False),
        ({"allowed_token_ids": (1,)}, True, False),
        ({"bad_words": ((1,),)}, True, False),
        ({"bad_words": ((1,), (2, 3))}, True, True),
        ({"grammar": "start: /a+/"}, True, True),
    ],
)
def test_what_edits_logits_and_what_waits_for_the_last_token(fields: Any, edits: bool, waits: bool) -> None:
    params = SamplingParams(**fields)
    assert (params.edits_logits, params.needs_last_token) == (edits, waits)


def test_a_budget_travels_beside_its_grammar() -> None:
    params = SamplingParams(grammar="start: /a+/", thinking_budget=ThinkingBudget(3, "", "</think>"))
    for data in (params.to_wire(), json.loads(json.dumps(params.to_wire()))):
        back = SamplingParams.from_wire(data)
        assert back == params
        assert back.thinking_budget is not None
        assert back.thinking_budget.close == "</think>"


def test_an_embedding_is_as_long_as_hidden_states_at_most() -> None:
    for dimensions in (None, 1, 64):
        params = SamplingParams.for_embedding("mean", dimensions)
        params.check_dimensions(64)
        assert SamplingParams.from_wire(params.to_wire()) == params
    with pytest.raises(InvalidRequestError, match="`dimensions` must be at most 64"):
        SamplingParams.for_embedding("last", 65).check_dimensions(64)


@pytest.mark.parametrize(
    ("fields", "some", "whole"),
    [
        ({}, False, False),
        ({"prompt_logprobs": 0}, True, True),
        ({"prompt_logprobs": 0, "prompt_logprobs_from": 5}, True, False),
        ({"max_tokens": 1, "pooling": "last"}, False, False),
        ({"max_tokens": 1, "pooling": "mean"}, False, True),
    ],
)
def test_how_much_of_a_prompt_must_be_computed_for_its_results(fields: Any, some: bool, whole: bool) -> None:
    params = SamplingParams(**fields)
    assert (params.wants_prompt_results, params.wants_whole_prompt) == (some, whole)


def test_ids_are_checked_against_the_width_of_the_logits() -> None:
    params = SamplingParams(stop_token_ids=(9,), logit_bias=((8, 1.0),))
    params.check_vocab(10)
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        params.check_vocab(9)
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        SamplingParams(logit_bias=((8, 1.0),)).check_vocab(8)
    with pytest.raises(InvalidRequestError, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=(8,)).check_vocab(8)
    with pytest.raises(InvalidRequestError, match="bad_words"):
        SamplingParams(bad_words=((1, 8),)).check_vocab(8)


def test_defaults_need_no_bytes_on_the_wire() -> None:
    assert SamplingParams().to_wire() == {}


@given(
    st.builds(
        SamplingParams,
        n=st.integers(1, 128),
        max_tokens=st.none() | st.integers(100, 200),
        min_tokens=st.integers(0, 100),
        temperature=st.floats(0, 2),
        top_k=st.integers(-1, 100),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
        logit_bias=st.lists(st.tuples(st.integers(0, 99), st.floats(-100, 100)), max_size=3).map(tuple),
        stop_token_ids=st.lists(st.integers(0, 99), max_size=3).map(tuple),
        allowed_token_ids=st.lists(st.integers(0, 99), max_size=3).map(tuple),
        bad_words=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
        ignore_eos=st.booleans(),
        logprobs=st.none() | st.integers(0, 20),
    )
)
def test_the_wire_keeps_everything_even_as_json(params: SamplingParams) -> None:
    assert SamplingParams.from_wire(json.loads(json.dumps(params.to_wire()))) == params


def test_the_wire_is_validated_too() -> None:
    with pytest.raises(InvalidRequestError):
        SamplingParams.from_wire({"n": 0})


def test_what_the_endpoint_derives_is_no_field_of_the_client() -> None:
    names = SamplingParams.client_fields()
    assert names.keys() >= {"temperature", "top_p", "stop_token_ids"}
    assert not names.keys() & {"max_tokens", "seed", "logprobs", "prompt_logprobs", "prompt_logprobs_from", "grammar"}
