"""The texts of transformers alone with the default model: `python -m load_tests.gpu.reference
SPEC`.

A separate process, so that its GPU memory is free when it ends. SPEC is JSON: prompts (texts),
count (tokens of each answer), device. Prints the texts as a JSON list on the last line.
"""

import json
import subprocess
import sys
from collections.abc import Sequence

import torch

from serve_app.checkpoints.model_files import locate_model
from serve_app.model.options import ModelOptions
from serve_app.model.sources.checkpoint import read_checkpoint
from serve_app.text.tokenizer import load_tokenizer


def reference_texts(prompts: Sequence[str], count: int, device: str) -> list[str]:
    """Return greedy texts of `count` tokens in float32.

    Raises `RuntimeError` if the process fails.
    """
    spec = json.dumps({"prompts": prompts, "count": count, "device": device})
    done = subprocess.run([sys.executable, "-m", __name__, spec], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return list(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Print the texts of the specification."""
    spec = json.loads(sys.argv[1])
    # several would wait for each other at every product, where servers share the cores
    torch.set_num_threads(1)
    device, cpu = torch.device(spec["device"]), torch.device("cpu")
    options = ModelOptions(dtype="float32")
    module = read_checkpoint(locate_model(options.model), options, cpu, lambda *_: None).to(device)
    tokenizer = load_tokenizer(options.model)
    texts = []
    for prompt in spec["prompts"]:
        ids = tokenizer.encode(prompt)
        found = module.generate(
            torch.tensor([ids], device=device),
            max_new_tokens=spec["count"],
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        texts.append(tokenizer.decode(found[0, len(ids) :].tolist()))
    print(json.dumps(texts))


if __name__ == "__main__":
    main()
