"""Workloads follow from their seed alone, and every prompt has exactly the tokens it promises."""

from random import Random

import pytest

from serve_app.text.tokenizer import load_tokenizer
from serve_app.workloads.mixes import GREEDY, SAMPLED, WORKLOADS, build_workload, read_names
from serve_app.workloads.prompts import PromptWriter, open_writer


@pytest.fixture(scope="module")
def writer() -> PromptWriter:
    return PromptWriter(load_tokenizer("default"))


@pytest.mark.parametrize("name", WORKLOADS)
def test_same_seed_same_requests_and_exact_lengths(name: str, writer: PromptWriter) -> None:
    workload = build_workload(name, writer, seed=3, duration_s=5.0)
    assert workload == build_workload(name, writer, seed=3, duration_s=5.0)
    assert workload.items
    for item in workload.items:
        assert len(writer.tokenizer.encode(item.prompt)) == item.prompt_tokens


@pytest.mark.parametrize("name", WORKLOADS)
def test_another_repeat_has_other_texts_of_the_same_lengths(name: str, writer: PromptWriter) -> None:
    first = build_workload(name, writer, repeat=0, duration_s=5.0)
    second = build_workload(name, writer, repeat=1, duration_s=5.0)
    salted = build_workload(name, writer, repeat=0, salt="x", duration_s=5.0)
    lengths = [(item.prompt_tokens, item.output_tokens, item.at_s) for item in first.items]
    for other in (second, salted):
        assert [(item.prompt_tokens, item.output_tokens, item.at_s) for item in other.items] == lengths
        assert all(a.prompt != b.prompt for a, b in zip(first.items, other.items, strict=True))


def test_sizes_are_those_that_the_log_compares(writer: PromptWriter) -> None:
    """Pinned: figures are comparable over time only while these stay."""
    sizes = {}
    for name in WORKLOADS:
        workload = build_workload(name, writer)
        prompt_tokens = sum(item.prompt_tokens for item in workload.items)
        sizes[name] = (
            len(workload.items),
            workload.concurrency,
            prompt_tokens,
            sum(item.output_tokens for item in workload.items),
        )
    assert sizes == {
        "mixed": (64, 16, 8785, 3885),
        "decode": (16, 16, 512, 2048),
        "prefill": (32, 8, 32768, 32),
        "single": (4, 1, 128, 512),
        "first_token": (24, 1, 768, 24),
        "shared_prefix": (32, 8, 25600, 512),
        "repetitive": (4, 1, 512, 512),
        "long": (8, 4, 24000, 512),
        "crowd": (128, 64, 8725, 7391),
        "lognormal": (48, 12, 11375, 3773),
        "agents": (48, 8, 36864, 2304),
        "sampled": (64, 16, 8785, 3885),
        "poisson": (56, None, 10347, 3536),
        "bursty": (102, None, 13554, 6286),
    }


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [("mixed", (16, 512), (4, 256)), ("crowd", (20, 120), (16, 96)), ("lognormal", (16, 1536), (4, 256))],
)
def test_drawn_lengths_stay_in_their_ranges(
    name: str, prompt: tuple[int, int], output: tuple[int, int], writer: PromptWriter
) -> None:
    items = build_workload(name, writer, seed=1).items
    assert all(prompt[0] <= item.prompt_tokens <= prompt[1] for item in items)
    assert all(output[0] <= item.output_tokens <= output[1] for item in items)
    assert len({item.prompt_tokens for item in items}) > 30


def test_shared_prefix_is_shared_and_the_rest_is_not(writer: PromptWriter) -> None:
    ids = [writer.ids(item.prompt) for item in build_workload("shared_prefix", writer).items]
    assert len({tuple(one[:768]) for one in ids}) == 1
    assert len({tuple(one[768:]) for one in ids}) == len(ids)


def test_repetitive_prompts_repeat_themselves(writer: PromptWriter) -> None:
    for item in build_workload("repetitive", writer).items:
        words = item.prompt.split()
        assert words == words[:32] * 4


def test_agents_go_on_where_they_were(writer: PromptWriter) -> None:
    workload = build_workload("agents", writer)
    ids = [writer.ids(item.prompt) for item in workload.items]
    assert len({tuple(one[:384]) for one in ids}) == 1
    assert len({tuple(one[384:448]) for one in ids}) == len(workload.lanes) == 8
    assert set(workload.lanes) == {1}
    for earlier, later in zip(ids, ids[8:], strict=False):
        assert later[: len(earlier)] == earlier
        assert len(later) == len(earlier) + 128


def test_sampled_is_mixed_with_other_texts_and_alone_is_not_greedy(writer: PromptWriter) -> None:
    mixed, sampled = build_workload("mixed", writer), build_workload("sampled", writer)
    for one, other in zip(mixed.items, sampled.items, strict=True):
        assert (one.prompt_tokens, one.output_tokens) == (other.prompt_tokens, other.output_tokens)
        assert one.prompt != other.prompt
    for name in WORKLOADS:
        wanted = SAMPLED if name == "sampled" else GREEDY
        assert {item.sampling for item in build_workload(name, writer, duration_s=5.0).items} == {wanted}


def test_names_come_with_how_many_requests() -> None:
    assert read_names("decode,prefill:16") == {"decode": None, "prefill": 16}
    for wrong in ("decode,", "decod", "decode:", "decode:0", "decode:-1", "decode:x"):
        with pytest.raises(ValueError, match=r"not one of|not a number"):
            read_names(wrong)


def test_poisson_arrivals_rise_and_keep_their_rate(writer: PromptWriter) -> None:
    workload = build_workload("poisson", writer, rate=20.0, duration_s=10.0)
    times = [item.at_s for item in workload.items]
    assert workload.concurrency is None
    assert times == sorted(times)
    assert times[-1] <= 10.0
    assert 140 < len(times) < 260


def test_unknown_names_are_refused(writer: PromptWriter) -> None:
    with pytest.raises(ValueError, match="decode"):
        build_workload("decod", writer)


def test_words_that_merge_are_noticed(writer: PromptWriter) -> None:
    class Merging:
        vocab_size = 200

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [0] * (len(text.split()) - ("wxa wxb" in text))

        def decode(self, token_ids: list[int]) -> str:
            return "wx" + chr(97 + token_ids[0] % 26) + "abcdefgh"[token_ids[0] // 26]

    merging = PromptWriter(Merging())  # type: ignore[arg-type]
    merging.words = ["wxa", "wxb"]
    with pytest.raises(ValueError, match="tokens instead of 50"):
        merging.write(Random(0), 50)


def test_a_tokenizer_file_will_do(tmp_path, writer: PromptWriter) -> None:  # type: ignore[no-untyped-def]
    writer.tokenizer._backend.save(str(tmp_path / "tokenizer.json"))  # type: ignore[attr-defined]
    assert open_writer(str(tmp_path)).ids("the sky") == writer.ids("the sky")
