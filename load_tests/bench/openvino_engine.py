"""OpenVINO GenAI's continuous batching as an engine for `offline`.

Its settings are near its defaults, except for some that make it faster or comparable. Needs the
packages that `peer_setup` installs; no other module imports this one.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai

from load_tests.bench.step_runner import StepOutput
from serve_app.workloads.mixes import WorkItem

_CACHE_GIB = 1
"""Memory for keys and values, as ours. With 8 bits per value it holds twice as many tokens."""


class OpenVinoEngine:
    """`ContinuousBatchingPipeline` on the CPU with a GGUF file.

    Its defaults are 256 tokens per step, 256 sequences, and 8-bit keys and values. Its prefix cache
    is off by default and on here, as in every server of the comparison. `max_num_seqs` None keeps
    its default.
    """

    def __init__(self, gguf: Path, max_num_seqs: int | None = None) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GIB
        scheduler.enable_prefix_caching = True
        if max_num_seqs is not None:
            scheduler.max_num_seqs = max_num_seqs
        self._pipeline = genai.ContinuousBatchingPipeline(str(gguf), scheduler, "CPU")
        self._handles: dict[int, genai.GenerationHandle] = {}

    def add(self, number: int, prompt: Sequence[int], item: WorkItem) -> None:
        config = genai.GenerationConfig(max_new_tokens=item.output_tokens, ignore_eos=True, do_sample=False)
        if item.sampling.temperature:  # its default is all tokens for top-k
            config.do_sample, config.temperature = True, item.sampling.temperature
            config.top_p, config.rng_seed = item.sampling.top_p, number
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        self._handles[number] = self._pipeline.add_request(number, ids, config)

    def step(self) -> Iterable[StepOutput]:
        self._pipeline.step()
        for number, handle in list(self._handles.items()):
            tokens = 0
            while handle.can_read():
                tokens += sum(len(output.generated_ids) for output in handle.read().values())
            status = handle.get_status()
            ended = status != genai.GenerationStatus.RUNNING
            if ended:
                del self._handles[number]
            yield StepOutput(
                number, tokens, ended, None if status in _GOOD else f"OpenVINO GenAI: {status.name.lower()}"
            )


_GOOD = (genai.GenerationStatus.RUNNING, genai.GenerationStatus.FINISHED)
