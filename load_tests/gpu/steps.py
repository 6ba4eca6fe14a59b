"""Single steps of a `PagedModel` with random weights, against limits measured on the same device.

A decode step must read every weight and every key and value once; its limit is the bandwidth of a
copy. A prefill must multiply; its limit is the rate of one large product.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.step_plan import ScheduledRequest, SchedulerOutput, SlotStart
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.model.attention_backend import AttentionBatch, AttentionLayer, block_matrix
from serve_app.model.loader import from_module, prepare
from serve_app.model.options import KernelOptions, ModelOptions
from serve_app.model.paged_model import PagedModel
from serve_app.model.profiling.limits import call_times
from serve_app.model.runner import ModelRunner, Pending
from serve_app.model.verification import TOLERANCE, ReferenceLogits

_REPEATS = {"cuda": 20, "cpu": 1}


@dataclass(frozen=True, slots=True)
class Machine:
    """The device and its limits: bytes read and written per second by a copy, operations per
    second."""

    device: torch.device
    dtype: torch.dtype
    copy_bandwidth: float
    matmul_rate: float

    @classmethod
    def measured(cls, device: torch.device) -> "Machine":
        """Measure the device's limits: bfloat16 on a GPU, float32 on a CPU."""
        gpu = device.type == "cuda"
        dtype = torch.bfloat16 if gpu else torch.float32
        # Random, like a model's: constant bits cost less power, and a GPU on them keeps a higher
        # clock.
        source = torch.randint(256, (1 << (31 if gpu else 24),), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy_s = median_time(lambda: target.copy_(source), device)
        size = 8192 if gpu else 512
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        matmul_s = median_time(lambda: a @ b, device)
        return cls(device, dtype, 2 * source.numel() / copy_s, 2 * size**3 / matmul_s)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, the bytes of weights that a decode step reads, and the number of weights
    per token."""

    model: PagedModel
    config: dict[str, Any]
    weight_bytes: int
    layer_weights: int
    stack: str

    @classmethod
    def random(
        cls,
        config: dict[str, Any],
        machine: Machine,
        *,
        quantization: str = "none",
        form: KernelOptions | None = None,
    ) -> "Loaded":
        """Return a random model of this shape."""
        module = random_module(config, machine.device, machine.dtype)
        total = sum(parameter.numel() for parameter in module.parameters())
        embedding = module.get_input_embeddings().weight.numel()
        # An embedding that is the head too is read whole; else few of its rows are.
        read = total if config["tie_word_embeddings"] else total - embedding
        heads = embedding if config["tie_word_embeddings"] else 2 * embedding
        model = paged(module, quantization=quantization, kernel_options=form or KernelOptions())
        size = 1 if quantization == "fp8" else machine.dtype.itemsize
        return cls(model, config, read * size, total - heads, type(model.executor).__name__)

    def attention_flops(self, lengths: Sequence[int]) -> int:
        """Return multiplications and additions of causal attention over whole sequences, in all
        layers."""
        width: int = self.config["num_attention_heads"] * _head_dim(self.config)
        layers: int = self.config["num_hidden_layers"]
        return sum(4 * width * length * (length + 1) // 2 for length in lengths) * layers


def random_module(config: dict[str, Any], device: torch.device, dtype: torch.dtype, **options: Any) -> Any:
    """Return transformers' model of this configuration with random weights, created on the
    device."""
    torch.manual_seed(0)
    values = {**config, "head_dim": _head_dim(config)}
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), dtype=dtype, **options)
    module.generation_config.eos_token_id = None
    return module.eval()


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]))


def paged(module: Any, **options: Any) -> PagedModel:
    """Return the engine's model, which takes the module over. options: of `ModelOptions`."""
    return prepare(module, "random", ModelOptions(**options))


def median_time(run: Callable[[], object], device: torch.device, part: int = 1) -> float:
    """Return the seconds of one call with all its launches, after warm-up. part: share of the usual
    repeats."""
    repeats = max(1, _REPEATS[device.type] // part)
    return statistics.median(call_times(run, device, repeats, uncounted=3 if device.type == "cuda" else 1))


def parity(config: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Compare greedy tokens of the engine, in packed steps, with transformers' `generate`, one at a
    time."""
    num_tokens, lengths = (24, (3, 17, 64, 65, 130, 250)) if device.type == "cuda" else (4, (3, 17, 70))
    module = random_module(config, device, torch.float32)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, config["vocab_size"], (length,), generator=generator) for length in lengths]
    expected = [
        module.generate(prompt[None].to(device), max_new_tokens=num_tokens, do_sample=False)[0, length:].tolist()
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    model = from_module(module, max_model_len=512)
    core = EngineCore(
        model,
        EngineConfig(max_num_batched_tokens=128, max_num_seqs=8, kv_cache_gib=2.0 if device.type == "cuda" else 0.05),
    )
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        core.add(EngineRequest(str(index), tuple(prompt.tolist()), params))
    got: list[list[int]] = [[] for _ in prompts]
    while core.has_unfinished:
        for delta in core.step() or ():
            got[int(delta.request_id)] += delta.token_ids
    equal = sum(ours == theirs for ours, theirs in zip(got, expected, strict=True))
    return {"passed": equal == len(prompts), "equal": equal, "of": len(prompts), "stack": type(model.executor).__name__}


def logits_parity(config: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """Return the difference from transformers' logits of packed prompts and one decode step.

    Measured by `ReferenceLogits`: for the engine, and for transformers' modules on the reference
    backend.
    """
    differences = {}
    for name in ("auto", "reference"):
        module = random_module(config, machine.device, machine.dtype)
        with torch.inference_mode():
            reference = ReferenceLogits.compute(module, "random", config["max_position_embeddings"])
            model = paged(module, attention_backend=name)
            # Rounded scores choose other experts for some tokens.
            typical = "num_experts" in config and machine.dtype != torch.float32
            differences[name] = reference.difference(model.executor, model.facts.layers, typical=typical)
    tolerance = TOLERANCE[machine.dtype]
    return {"passed": differences["auto"] <= tolerance, "ratio": differences["auto"] / tolerance, **differences}


def decode_step(
    loaded: Loaded, machine: Machine, rows: int, context: int, limit: float | None, **sampling: Any
) -> dict[str, Any]:
    """Measure a whole step of the engine's runner, from the plan to the tokens, which are read each
    time.

    sampling: fields of `SamplingParams`; greedy without any.
    """
    runner, output = _decode_plan(loaded.model, rows, context, SamplingParams(**(sampling or {"temperature": 0.0})))

    def launch() -> Pending:
        return runner.finish(runner.launch(output))

    queue = _REPEATS[machine.device.type]

    def several() -> None:
        for _ in range(queue):
            launch()

    step_s = median_time(lambda: launch().resolve(), machine.device)
    queued_s = median_time(several, machine.device, part=6) / queue
    kv_bytes = rows * context * loaded.model.kv_bytes_per_block() // loaded.model.block_size
    floor_s = (loaded.weight_bytes + kv_bytes) / machine.copy_bandwidth
    return {
        "passed": _fast_stack(loaded, machine) and (limit is None or queued_s <= limit * floor_s),
        "ratio": queued_s / floor_s,
        "waited_ratio": step_s / floor_s,
        "step_ms": step_s * 1e3,
        "queued_step_ms": queued_s * 1e3,
        "floor_ms": floor_s * 1e3,
        "stack": loaded.stack,
        "backend": loaded.model.attention_backend,
    }


def _fast_stack(loaded: Loaded, machine: Machine) -> bool:
    """Whether a GPU runs the fused decoder. Times of another one are not valid."""
    return machine.device.type != "cuda" or loaded.stack == "GpuDecoder"


def prefill(loaded: Loaded, machine: Machine, prompts: int, length: int, limit: float | None) -> dict[str, Any]:
    """Measure whole prompts in one step, with the logits of their last tokens."""
    ids, positions, batch = _batch(loaded.model, [(0, length)] * prompts)
    last = torch.tensor(batch.query_starts[1:], device=machine.device) - 1

    def step() -> list[int]:
        hidden = loaded.model.forward(ids, positions, batch)
        tokens: list[int] = loaded.model.compute_logits(hidden[last]).argmax(-1).tolist()
        return tokens

    step_s = median_time(step, machine.device, part=4)
    flops = 2 * loaded.layer_weights * prompts * length + loaded.attention_flops([length] * prompts)
    share = flops / step_s / machine.matmul_rate
    return {
        "passed": _fast_stack(loaded, machine) and (limit is None or share >= limit),
        "ratio": share,
        "step_ms": step_s * 1e3,
        "tflop_per_s": flops / step_s / 1e12,
        "tokens_per_s": prompts * length / step_s,
        "stack": loaded.stack,
    }


def attention_bandwidth(
    machine: Machine, shape: tuple[int, int, int], *, rows: int, context: int, limit: float
) -> dict[str, Any]:
    """Return bytes of keys and values per second of the attention kernel alone in decode.

    Measured as one graph of several launches.
    """
    from serve_app.model.gpu.attention import TritonAttention

    heads, kv_heads, dim = shape
    layer, backend = AttentionLayer(heads, kv_heads, dim, dim, dim**-0.5), TritonAttention()
    blocks = -(-context // backend.block_size)
    cache = backend.allocate(layer, 1 + rows * blocks, machine.dtype, machine.device)
    tables = (torch.randperm(rows * blocks) + 1).view(rows, blocks).tolist()
    slots = torch.zeros(rows, dtype=torch.int64, device=machine.device)
    metadata = backend.build(AttentionBatch(list(range(rows + 1)), [context] * rows, block_matrix(tables), slots))
    query = torch.randn(rows, heads, dim, device=machine.device).to(machine.dtype)
    out = torch.empty_like(query)
    launches = _REPEATS[machine.device.type]

    def several() -> None:
        for _ in range(launches):
            backend.attend(layer, query, cache, metadata, out)

    several()
    run: Callable[[], object] = several
    if machine.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            several()
        run = graph.replay
    seconds = median_time(run, machine.device) / launches
    bandwidth = 2 * rows * context * kv_heads * dim * machine.dtype.itemsize / seconds
    share = bandwidth / machine.copy_bandwidth
    return {"passed": share >= limit, "ratio": share, "gb_per_s": bandwidth / 1e9, "us": seconds * 1e6}


def _decode_plan(
    model: PagedModel, rows: int, context: int, params: SamplingParams
) -> tuple[ModelRunner, SchedulerOutput]:
    """Return a runner with sequences of that many keys, and the plan of their next token.

    The plan runs repeatedly. As with overlapping steps, only the device knows the last token.
    """
    runner, needed = ModelRunner(model, rows), -(-context // model.block_size)
    runner.allocate_kv_cache(1 + rows * needed)
    order = (torch.randperm(rows * needed, generator=torch.Generator().manual_seed(0)) + 1).view(rows, needed).tolist()
    starts = tuple(
        SlotStart(row, str(row), 0, (0,) * context, context, replace(params, seed=row), tuple(blocks))
        for row, blocks in enumerate(order)
    )
    plan = tuple(
        ScheduledRequest(row, str(row), 0, context - 1, 1, (), samples=True, is_prefill=False, token_in_flight=True)
        for row in range(rows)
    )
    output = SchedulerOutput(0, plan, starts, (), rows)
    runner.finish(runner.launch(output)).resolve()
    return runner, replace(output, slot_starts=())


def _batch(model: PagedModel, rows: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    """Return token ids, positions and metadata of rows (keys before, queries), in a new pool of
    scattered blocks."""
    size, device = model.block_size, model.device
    lengths = [before + count for before, count in rows]
    needed = [-(-length // size) for length in lengths]
    model.allocate_kv_cache(1 + sum(needed))
    order = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)) + 1).tolist()
    tables: list[Sequence[int]] = [
        order[end - count : end] for count, end in zip(needed, accumulate(needed), strict=True)
    ]
    positions = torch.cat([torch.arange(before, before + count) for before, count in rows])
    blocks = torch.cat(
        [
            torch.tensor(table)[torch.arange(before, before + count) // size]
            for table, (before, count) in zip(tables, rows, strict=True)
        ]
    )
    batch = AttentionBatch(
        [0, *accumulate(count for _, count in rows)],
        lengths,
        block_matrix(tables),
        (blocks * size + positions % size).to(device),
    )
    ids = torch.randint(2, 500, positions.shape, generator=torch.Generator().manual_seed(0))
    return ids.to(device), positions.to(device), batch
