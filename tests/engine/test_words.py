"""Words that may not come and tokens that alone may, against transformers' generation."""

import torch

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.model.loader import from_module
from tests.engine.harness import Harness
from tests.models import tiny_model

PROMPT = tuple(range(40, 52))
NUM_TOKENS = 40


def test_what_is_left_is_what_transformers_leaves() -> None:
    module = tiny_model("llama", torch.float32)
    harness = Harness(from_module(module))

    def expected(**how: object) -> list[int]:
        ids = module.generate(
            torch.tensor([PROMPT]), do_sample=False, min_new_tokens=NUM_TOKENS, max_new_tokens=NUM_TOKENS, **how
        )
        found: list[int] = ids[0, len(PROMPT) :].tolist()
        return found

    def got(**how: object) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logit_bias=ENDLESS, **how)  # type: ignore[arg-type]
        return harness.run([EngineRequest("r", PROMPT, params)]).outcomes["r", 0].token_ids

    free = expected()
    assert got() == free
    # Each word stands in the output as it was without it, so that each takes effect.
    words = [free[0:1], free[5:7], free[10:13]]
    assert got(bad_words=tuple(map(tuple, words))) == expected(bad_words_ids=words) != free
    allowed = list(range(60, 90))
    assert got(allowed_token_ids=tuple(allowed)) == expected(prefix_allowed_tokens_fn=lambda _, __: allowed)
    both = {"bad_words_ids": [[60], [61, 62]], "prefix_allowed_tokens_fn": lambda _, __: allowed}
    assert got(allowed_token_ids=tuple(allowed), bad_words=((60,), (61, 62))) == expected(**both)


ENDLESS = ((1, -100.0),)
"""The end of the sequence does not come, as `min_new_tokens` has it in transformers."""
