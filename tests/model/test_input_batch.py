from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from serve_app.core.sampling_params import SamplingParams
from serve_app.core.step_plan import ScheduledRequest, SchedulerOutput, SlotStart
from serve_app.model.input_batch import InputBatch, sampling_rows
from serve_app.model.sampling import noise

BLOCK = 4


def start(slot: int, tokens: range | list[int], blocks: tuple[int, ...], num_prompt: int) -> SlotStart:
    return SlotStart(slot, f"r{slot}", 0, tuple(tokens), num_prompt, SamplingParams(), blocks)


def row(slot: int, begin: int, count: int, new_blocks: tuple[int, ...] = ()) -> ScheduledRequest:
    return ScheduledRequest(slot, f"r{slot}", 0, begin, count, new_blocks, samples=True, is_prefill=True)


def step(rows: list[ScheduledRequest], starts: list[SlotStart]) -> SchedulerOutput:
    return SchedulerOutput(0, tuple(rows), tuple(starts), (), sum(r.num_tokens for r in rows))


def test_packs_rows_behind_one_another() -> None:
    batch = InputBatch(max_num_seqs=3, max_model_len=16, block_size=BLOCK)
    # Slot 2 goes on at token 3 (chunked, or a prefix hit); slot 0 decodes its sixth token.
    output = step(
        [row(2, 3, 5), row(0, 5, 1)],
        [start(2, range(100, 109), (9, 4, 6), 9), start(0, range(200, 206), (3, 8), 4)],
    )
    batch.apply(output)
    packed = batch.pack(output.rows)
    input_ids, positions, kv_slots, seq_slots = packed.host.tolist()
    assert input_ids == [103, 104, 105, 106, 107, 205]
    assert positions == [3, 4, 5, 6, 7, 5]
    assert kv_slots == [9 * 4 + 3, 4 * 4, 4 * 4 + 1, 4 * 4 + 2, 4 * 4 + 3, 8 * 4 + 1]
    assert seq_slots == [2, 2, 2, 2, 2, 0]
    assert packed.query_starts == [0, 5, 6]
    assert packed.kv_lens == [8, 6]
    assert batch.block_tables(packed).tolist() == [[9, 4], [3, 8]]
    assert [slot.num_output_tokens for slot in packed.slots] == [0, 2]


def test_sampled_tokens_and_new_blocks_are_inputs_of_the_next_step() -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=8, block_size=BLOCK)
    first = step([row(0, 0, 4)], [start(0, [1, 2, 3, 4], (5,), 4)])
    batch.apply(first)
    batch.remember(batch.pack(first.rows).sampling, [77])
    second = step([row(0, 4, 1, (2,))], [])
    batch.apply(second)
    packed = batch.pack(second.rows)
    assert packed.host.tolist() == [[77], [4], [2 * BLOCK], [0]]
    assert list(batch.block_tables(packed)[0]) == [5, 2]
    assert packed.kv_lens == [5]


def test_a_slots_next_owner_inherits_nothing() -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=12, block_size=BLOCK)
    batch.apply(step([row(0, 0, 9)], [start(0, range(9), (1, 2, 3), 9)]))
    output = step([row(0, 0, 2)], [start(0, [50, 51], (7,), 2)])
    batch.apply(output)
    packed = batch.pack(output.rows)
    assert packed.host.tolist() == [[50, 51], [0, 1], [28, 29], [0, 0]]
    assert list(batch.block_tables(packed)[0]) == [7]
    batch.remember(packed.sampling, [52])
    assert packed.slots[0].token_ids[:3].tolist() == [50, 51, 52]


def test_what_is_sampled_for_a_slots_last_owner_is_not_the_next_ones() -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=12, block_size=BLOCK)
    first = step([row(0, 0, 3)], [start(0, range(3), (1,), 3)])
    batch.apply(first)
    rows = batch.pack(first.rows).sampling
    batch.apply(step([row(0, 0, 5)], [start(0, range(50, 55), (1, 2), 5)]))
    batch.remember(rows, [77])
    assert batch.pack([row(0, 0, 5)]).host[0].tolist() == [50, 51, 52, 53, 54]


def test_ids_in_flight_are_left_open() -> None:
    batch = InputBatch(max_num_seqs=3, max_model_len=12, block_size=BLOCK)
    output = step(
        [row(1, 0, 3), row(2, 0, 2), row(0, 0, 1)],
        [start(1, range(20, 23), (1,), 3), start(2, range(30, 32), (2,), 2), start(0, [40, 41], (3,), 2)],
    )
    batch.apply(output)
    assert not batch.pack(output.rows).has_unknown_ids
    ahead = [
        row(1, 3, 1)._replace(token_in_flight=True),
        row(2, 2, 1)._replace(token_in_flight=True),
        row(0, 1, 1),
    ]
    packed = batch.pack(ahead)
    assert packed.has_unknown_ids
    assert packed.host.tolist() == [[-1, -1, 41], [3, 2, 1], [1 * 4 + 3, 2 * 4 + 2, 3 * 4 + 1], [1, 2, 0]]


def test_the_last_token_of_a_full_context_has_room() -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=4, block_size=BLOCK)
    output = step([row(0, 0, 4)], [start(0, range(4), (1,), 3)])
    batch.apply(output)
    packed = batch.pack(output.rows)
    batch.remember(packed.sampling, [9])
    assert packed.slots[0].token_ids.tolist() == [0, 1, 2, 3, 9]


def test_a_row_without_a_slot_is_a_bug_and_says_so() -> None:
    batch = InputBatch(max_num_seqs=2, max_model_len=4, block_size=BLOCK)
    with pytest.raises(RuntimeError, match="slot 1"):
        batch.pack([row(1, 0, 1)])


def test_a_token_is_sampled_after_the_last_one_and_after_each_draft() -> None:
    batch = InputBatch(max_num_seqs=4, max_model_len=12, block_size=BLOCK)
    hot = SamplingParams(temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, seed=3)
    starts = [
        start(0, range(20, 23), (1,), 3),
        replace(start(2, range(30, 34), (2, 3), 2), params=hot),
        start(3, range(40, 48), (4, 5), 8),
    ]
    rows = [
        row(0, 0, 2)._replace(samples=False),
        row(2, 3, 3)._replace(draft_token_ids=(77, 78)),
        row(3, 0, 8),
    ]
    batch.apply(step(rows, starts))
    packed = batch.pack(rows)
    assert packed.has_drafts
    assert packed.host[0, 2:5].tolist() == [33, 77, 78]
    sampling = packed.sampling
    assert sampling.tokens.tolist() == [2, 3, 4, 12]
    assert sampling.seq_slots.tolist() == [2, 2, 2, 3]
    assert sampling.num_tokens.tolist() == [slot.num_tokens for slot in sampling.states()] == [4, 5, 6, 8]
    assert sampling.parameters[:3, :4].tolist() == [[0.5, 0, 0.9, 0.1]] * 3
    expected = noise.at(noise.keys([3] * 3, [0] * 3), np.array([4, 5, 6]))
    assert sampling.parameters[:3, 4].tolist() == expected.tolist()


def test_hidden_states_are_wanted_where_something_is_made_of_them() -> None:
    batch = InputBatch(max_num_seqs=5, max_model_len=12, block_size=BLOCK)
    starts = [start(slot, range(4), (slot + 1,), 4) for slot in range(5)]
    starts[3] = replace(starts[3], params=SamplingParams(prompt_logprobs=0))
    starts[4] = replace(starts[4], params=SamplingParams.for_embedding("mean"))
    parts = [row(slot, 0, 2)._replace(samples=False) for slot in (1, 3, 4)]
    batch.apply(step([row(0, 0, 4), *parts, row(2, 3, 1)], starts))
    wanted = batch.pack([row(0, 0, 4), *parts, row(2, 3, 1)]).wanted()
    assert wanted is not None
    assert wanted.tolist() == [False, False, False, True, False, False, True, True, True, True, True]
    assert batch.pack([row(0, 3, 1), row(2, 3, 1)]).wanted() is None


@pytest.mark.parametrize(
    ("fields", "plain"),
    [
        ({"temperature": 0.3, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "stop_token_ids": (3,)}, [True, True]),
        ({"min_tokens": 2}, [False, True]),
        ({"logprobs": 0}, [False, False]),
        ({"logit_bias": ((3, 0.5),)}, [False, False]),
        ({"repetition_penalty": 1.1}, [False, False]),
        ({"presence_penalty": 0.1}, [False, False]),
        ({"frequency_penalty": -0.1}, [False, False]),
    ],
)
def test_what_changes_or_shows_logits_is_not_plain(fields: dict[str, Any], plain: list[bool]) -> None:
    """With one output token, and with two."""
    others = SlotStart(1, "other", 0, (1, 2), 1, SamplingParams(), ())
    subject = SlotStart(0, "r", 0, (1, 2, 3), 2, SamplingParams(**fields), ())
    longer = replace(subject, token_ids=(1, 2, 3, 4))
    assert [sampling_rows([other, others]).is_plain for other in (subject, longer)] == plain
