from hypothesis import given
from hypothesis import strategies as st

from serve_app.text.stop import StopMatcher

few_letters = st.text(alphabet="ab", max_size=40)
stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3)


def cut(text: str, borders: list[int]) -> list[str]:
    places = sorted({min(b, len(text)) for b in borders} | {0, len(text)})
    return [text[a:b] for a, b in zip(places, places[1:], strict=False)]


def stopped_by_search(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The slow twin: try every prefix of the text, shortest first."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[:end] if include else text[: end - len(longest)], longest
    return text, None


@given(few_letters, stops, st.lists(st.integers(0, 40), max_size=8), st.booleans())
def test_any_cut_shows_what_a_search_of_the_whole_text_finds(
    text: str, stops: list[str], borders: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include=include)
    shown = ""
    for piece in cut(text, borders):
        shown += matcher.feed(piece)
        if matcher.stopped:
            break
    else:
        shown += matcher.flush()
    assert (shown, matcher.found) == stopped_by_search(text, stops, include)


@given(few_letters, stops)
def test_only_what_may_still_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for i, char in enumerate(text):
        shown += matcher.feed(char)
        if matcher.stopped:
            return
        held = text[len(shown) : i + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(text[: i + 1].endswith(stop[:k]) for stop in stops for k in range(len(held) + 1, len(stop)))


def test_without_stop_strings_nothing_is_held() -> None:
    matcher = StopMatcher(())
    assert matcher.feed("abc") == "abc"
    assert matcher.flush() == ""
