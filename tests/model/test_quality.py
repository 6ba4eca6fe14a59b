"""How far int8 mode may be from exact mode on the default model."""

import torch

from load_tests.bench.quality import compare
from serve_app.model.loader import load_model
from serve_app.model.options import ModelOptions
from serve_app.text.tokenizer import load_tokenizer
from tests.models import needs_compiler

TEXT = """\
The harbour of a small town on the coast was rebuilt in 1974, after a storm had broken its northern wall. Three boats
were lost, two of them with all their nets, and the council borrowed 460,000 kroner for stone, cranes and a new light.
Old people say that the water has been calmer since then, but the measurements do not show it: the mean height of the
waves in January is 1.8 m, as it was before. What has changed is the traffic. In 1980 there were 61 fishing boats, in
2000 only 19, and today the quays belong to visitors from the south, who come in June and leave before the first frost.

To install the package, create a virtual environment and run the following commands:

    python -m venv .venv
    .venv/bin/pip install --upgrade pip
    .venv/bin/pip install -r requirements.txt

If the second command fails with "permission denied", check who owns the folder. A configuration file looks like this:

    {"name": "worker", "replicas": 3, "timeout_s": 2.5, "labels": ["blue", "green"], "retry": {"limit": 5}}

Question: A train leaves at 9:15 and travels 210 km at 84 km/h. When does it arrive?
Answer: The journey takes 210 / 84 = 2.5 hours, so the train arrives at 11:45.

def fibonacci(n: int) -> int:
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
"""


@needs_compiler
@torch.inference_mode()
def test_int8_stays_near_to_exact_mode() -> None:
    """The bounds hold for every build. Where the largest input of a row is rounded as the others
    are, the mean is 0.0030."""
    ids = load_tokenizer("default").encode(TEXT)
    exact, int8 = (load_model(ModelOptions(quantization=mode)) for mode in ("none", "int8"))
    quality = compare(exact, int8, ids, window=512)
    assert quality.positions == len(ids) - 1 == 393
    assert quality.kl_mean < 0.0022
    assert quality.kl_p99 < 0.014
    assert quality.top1 > 0.97
