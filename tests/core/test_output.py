from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.results import EMBEDDING, LOGPROBS, NO_RESULTS, FinishReason, TokenDelta, TokenLogprob, join_deltas


@st.composite
def steps_of_a_choice(draw: st.DrawFn, choice: int) -> list[TokenDelta]:
    """Its deltas step by step: first what was cached and the prompt's log-probabilities, last why
    it ended."""
    sizes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    deltas, offset = [], draw(st.integers(0, 5))
    for i, size in enumerate(sizes):
        ids = tuple(draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)))
        deltas.append(
            TokenDelta(
                "r",
                choice,
                offset,
                ids,
                results={LOGPROBS: tuple(TokenLogprob(id_, -float(offset + k)) for k, id_ in enumerate(ids))},
                prompt_results={LOGPROBS: (TokenLogprob(i, -1.0),)} if not choice and i < 2 else NO_RESULTS,
                num_cached_tokens=7 if i == 0 else None,
            )
        )
        offset += size
    if draw(st.booleans()):
        reason, error = draw(st.sampled_from([(FinishReason.STOP, None), (FinishReason.ERROR, "broken")]))
        deltas[-1] = deltas[-1]._replace(finish_reason=reason, error=error)
    return deltas


@given(steps_of_a_choice(0), steps_of_a_choice(1))
def test_joined_deltas_say_the_same(first: list[TokenDelta], second: list[TokenDelta]) -> None:
    mixed = sorted(
        [(i / len(part), delta) for part in (first, second) for i, delta in enumerate(part)], key=lambda pair: pair[0]
    )
    joined = join_deltas([delta for _, delta in mixed])
    assert [delta.choice for delta in joined] == [0, 1]
    for part, delta in zip((first, second), joined, strict=True):
        assert (delta.request_id, delta.offset) == ("r", part[0].offset)
        assert delta.token_ids == tuple(i for step in part for i in step.token_ids)
        assert delta.logprobs == tuple(entry for step in part for entry in step.logprobs)
        assert delta.prompt_logprobs == tuple(entry for step in part for entry in step.prompt_logprobs)
        assert delta.num_cached_tokens == 7
        assert (delta.finish_reason, delta.error) == (part[-1].finish_reason, part[-1].error)


def test_an_embedding_is_there_once_asked_for() -> None:
    delta = TokenDelta("r", 0, 0, (1,))
    assert delta.embedding is None
    assert delta._replace(results={EMBEDDING: (b"abcd",)}).embedding == b"abcd"


def test_one_delta_is_joined_with_nothing() -> None:
    deltas = [TokenDelta("x", 0, 0, (1, 2))]
    assert join_deltas(deltas) == [TokenDelta("x", 0, 0, (1, 2))]
