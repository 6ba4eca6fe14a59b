"""What `make_choices` refuses, and the limits it sets."""

from typing import Any

import pytest

from serve_app.core.config import SchedulerConfig
from serve_app.core.request import EngineRequest, RequestStatus, make_choices
from serve_app.core.results import LOGPROBS, TokenLogprob
from serve_app.core.sampling_params import SamplingParams
from serve_app.errors import ContextLengthError, InvalidRequestError


def make_config(**changes: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"num_blocks": 101, "block_size": 4, "max_model_len": 30, "vocab_size": 50} | changes)


def refused(config: SchedulerConfig, **fields: Any) -> InvalidRequestError:
    fields = {"request_id": "a", "prompt_token_ids": (1, 2), "params": SamplingParams()} | fields
    with pytest.raises(InvalidRequestError) as caught:
        make_choices(EngineRequest(**fields), config, 0, 0.0)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt_token_ids": ()}, "prompt", "at least one token"),
        ({"prompt_token_ids": (1, 50)}, "prompt", "token id 50; ids are 0 to 49"),
        ({"prompt_token_ids": (1, -1)}, "prompt", "token id -1"),
        ({"prompt_token_ids": (1, "2")}, "prompt", "integers"),
        ({"prompt_token_ids": (1, True)}, "prompt", "integers"),
        ({"params": SamplingParams(stop_token_ids=(50,))}, "stop_token_ids", "below 50"),
        ({"params": SamplingParams(logit_bias=((50, 1.0),))}, "logit_bias", "below 50"),
        ({"priority": "1"}, "priority", "integer"),
        ({"cache_salt": None}, "cache_salt", "string"),
        ({"prior_output_ids": ((1,), (2,))}, "prior_output_ids", "2 entries for 1 choices"),
        ({"prior_output_ids": ((50,),)}, "prior_output_ids", "token id 50"),
    ],
)
def test_malformed(fields: dict[str, Any], param: str, message: str) -> None:
    error = refused(make_config(), **fields)
    assert error.param == param
    assert message in error.message
    assert not isinstance(error, ContextLengthError)


@pytest.mark.parametrize(
    ("fields", "param", "limit"),
    [
        ({"prompt_token_ids": (1,) * 30}, "prompt", "30 tokens"),
        ({"params": SamplingParams(max_tokens=29)}, "max_tokens", "30 tokens"),
        ({"params": SamplingParams(min_tokens=29)}, "min_tokens", "30 tokens"),
        ({"params": SamplingParams(max_tokens=3), "prior_output_ids": ((1,) * 4,)}, "prior_output_ids", "at most 3"),
    ],
)
def test_over_the_context(fields: dict[str, Any], param: str, limit: str) -> None:
    error = refused(make_config(), **fields)
    assert isinstance(error, ContextLengthError)
    assert error.param == param
    assert limit in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_token_ids": (1,) * 13}, "prompt"),
        ({"params": SamplingParams(max_tokens=12)}, "max_tokens"),
        ({"params": SamplingParams(min_tokens=12)}, "min_tokens"),
    ],
)
def test_over_the_pool(fields: dict[str, Any], param: str) -> None:
    # 3 blocks of 4 tokens; the 13th token is never computed.
    error = refused(make_config(num_blocks=4), **fields)
    assert isinstance(error, ContextLengthError)
    assert error.param == param
    assert "13 tokens" in error.message


@pytest.mark.parametrize(
    ("num_blocks", "max_tokens", "limit"), [(101, None, 30), (101, 5, 7), (4, None, 13), (4, 11, 13), (101, 28, 30)]
)
def test_the_length_limit(num_blocks: int, max_tokens: int | None, limit: int) -> None:
    request = EngineRequest("a", (1, 2), SamplingParams(max_tokens=max_tokens))
    assert make_choices(request, make_config(num_blocks=num_blocks), 0, 0.0)[0].max_num_tokens == limit


def test_a_prompt_that_is_embedded_may_fill_the_context() -> None:
    params = SamplingParams.for_embedding("last")
    make_choices(EngineRequest("a", (1,) * 30, params), make_config(), 0, 0.0)
    error = refused(make_config(), prompt_token_ids=(1,) * 31, params=params)
    assert isinstance(error, ContextLengthError)
    assert (error.param, error.message) == ("prompt", "`prompt` has 31 tokens, but the model's context is 30")


def test_a_prompt_that_is_computed_again_repeats_no_logprobs() -> None:
    request = EngineRequest("a", (1, 2, 3, 4), SamplingParams(prompt_logprobs=0))
    choice = make_choices(request, make_config(), 0, 0.0)[0]
    entries = tuple(TokenLogprob(token_id, -1.0) for token_id in (2, 3, 4))
    assert choice.take_prompt_results({LOGPROBS: entries[:2]}, 0) == {LOGPROBS: entries[:2]}
    assert choice.take_prompt_results({LOGPROBS: entries}, 0) == {LOGPROBS: entries[2:]}
    assert choice.take_prompt_results({LOGPROBS: entries}, 0) == {}


def test_the_first_unfinished_choice_leads() -> None:
    params = SamplingParams(n=4, max_tokens=3, stop_token_ids=(9,))
    request = EngineRequest("a", (1,), params, prior_output_ids=((1, 2, 3), (9,), (1,), ()))
    choices = make_choices(request, make_config(), 0, 0.0)
    assert [choice.status for choice in choices] == [
        RequestStatus.FINISHED,
        RequestStatus.FINISHED,
        RequestStatus.WAITING,
        RequestStatus.FORKING,
    ]
    assert choices[3].leader is choices[2]


@pytest.mark.parametrize(
    ("params", "output", "reason"),
    [
        (SamplingParams(), (), None),
        (SamplingParams(), (1,), None),
        (SamplingParams(), (1, 7), "stop"),
        (SamplingParams(ignore_eos=True), (1, 7), None),
        (SamplingParams(stop_token_ids=(8,)), (8,), "stop"),
        (SamplingParams(stop_token_ids=(7,), ignore_eos=True), (7,), "stop"),
        (SamplingParams(min_tokens=3), (1, 7), None),
        (SamplingParams(min_tokens=2), (1, 7), "stop"),
        (SamplingParams(max_tokens=2), (1, 1), "length"),
        (SamplingParams(max_tokens=2), (1, 7), "stop"),
    ],
)
def test_when_a_choice_ends(params: SamplingParams, output: tuple[int, ...], reason: str | None) -> None:
    config = make_config(eos_token_ids=(7,))
    request = EngineRequest("a", (7,), params)  # a stop token in the prompt stops nothing
    choice = make_choices(request, config, 0, 0.0)[0]
    choice.token_ids += output
    assert choice.finish_reason() == reason
