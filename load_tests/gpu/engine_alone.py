"""Runs the engine without a server on the server's prompts: `python -m load_tests.gpu.engine_alone
SPEC`.

A separate process, so that its GPU memory is free when the server starts. SPEC is JSON: model (a
folder), device, dtype, prompts (token ids), output (tokens), users (several numbers). Prints one
JSON object: for each number of users output tokens per second and the median TTFT.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.engine.core import EngineCore
from serve_app.serving.engine_config import engine_config
from serve_app.settings import Settings


def main() -> None:
    """Measure the cases of the specification."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    settings = Settings.model_validate(
        {"model": spec["model"], "device": spec["device"], "dtype": spec["dtype"], "engine": spec["engine"]}
    )
    core = EngineCore.load(engine_config(settings, use_gpu=spec["device"] == "cuda"))
    warm = spec["prompts"][: max(spec["users"])]
    closed_loop(core, warm, 2, len(warm), "warm")
    figures = {}
    for users in spec["users"]:
        prompts = spec["prompts"][: 2 * users]
        rate, ttft_s = closed_loop(core, prompts, spec["output"], users, str(users))
        figures[users] = {
            "tokens_per_s": rate,
            "ttft_p50_ms": 1e3 * statistics.median(ttft_s),
            "executor": core.info.executor,
        }
    print(json.dumps(figures))


def closed_loop(
    core: EngineCore, prompts: Sequence[Sequence[int]], output: int, users: int, name: str
) -> tuple[float, list[float]]:
    """Return output tokens per second and each request's TTFT in seconds, with `users` at
    a time."""
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    waiting = list(enumerate(prompts))[::-1]
    began: dict[str, float] = {}
    first: dict[str, float] = {}
    start = time.perf_counter()

    def send_next() -> None:
        if waiting:
            number, prompt = waiting.pop()
            request = EngineRequest(f"{name}-{number}", tuple(prompt), params)
            began[request.request_id] = time.perf_counter()
            core.add(request)

    for _ in range(users):
        send_next()
    while core.has_unfinished:
        for delta in core.step() or ():
            if delta.token_ids:
                first.setdefault(delta.request_id, time.perf_counter() - began[delta.request_id])
            if delta.finish_reason is not None:
                send_next()
    took_s = time.perf_counter() - start
    return len(prompts) * output / took_s, list(first.values())


if __name__ == "__main__":
    main()
