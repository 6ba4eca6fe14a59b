"""The scheduler's invariants under arbitrary workloads."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.policy import SchedulerConfig
from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from tests.core.fake_model import Driver

VOCAB = 11
EOS = 3


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    block_size = draw(st.integers(1, 4))
    max_num_seqs = draw(st.integers(1, 5))
    return SchedulerConfig(
        num_blocks=draw(st.integers(24 // block_size + 1, 40)),
        block_size=block_size,
        max_model_len=24,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 10)),
        policy=draw(st.sampled_from(["fcfs", "priority", "static"])),
        prefill=draw(st.sampled_from(["fused", "separate"])),
        waiting_served_ratio=draw(st.sampled_from([0.0, 0.5, 2.0])),
        max_wait_s=draw(st.sampled_from([0.0, 2.0, 50.0])),
        max_waiting_steps=draw(st.sampled_from([1, 3, 50])),
        enable_prefix_cache=draw(st.booleans()),
    )


@st.composite
def requests(draw: st.DrawFn) -> EngineRequest:
    # Few token values and one common stem: shared prefixes are the rule.
    prompt = draw(st.sampled_from([(), (1, 2, 1, 2, 1, 2, 1, 2)])) + tuple(
        draw(st.lists(st.integers(0, 2), max_size=6))
    )
    prompt = prompt or (1,)
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 24 - len(prompt))))
    return EngineRequest(
        request_id="",
        prompt_token_ids=prompt,
        params=SamplingParams(
            n=draw(st.sampled_from([1, 1, 1, 2, 4])),
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, min(3, max_tokens or 3))),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=draw(st.sampled_from([(), (5,)])),
            prompt_logprobs=draw(st.sampled_from([None, None, 0])),
        ),
        cache_salt=draw(st.sampled_from(["", "tenant"])),
        priority=draw(st.integers(0, 2)),
    )


workloads = st.lists(requests(), min_size=1, max_size=10).map(
    lambda items: [replace(item, request_id=f"r{i}") for i, item in enumerate(items)]
)


@given(configs(), workloads)
@settings(max_examples=300, deadline=None)
def test_outputs_are_those_of_each_request_alone(config: SchedulerConfig, workload: list[EngineRequest]) -> None:
    driver = Driver(config)
    driver.run(*workload)
    driver.check_outputs(*workload)
