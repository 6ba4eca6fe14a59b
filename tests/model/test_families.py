"""Records of every family, and that the check at load sees each of their fields."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

from serve_app.model.attention_backend import AttentionLayer
from serve_app.model.cpu.decoder import CpuDecoder
from serve_app.model.cpu.ops import Arithmetic, Kernels
from serve_app.model.executor import UnsupportedModelError
from serve_app.model.executors import cpu
from serve_app.model.families import recognise
from serve_app.model.options import ModelOptions
from serve_app.model.records import Activation, DecoderRecord, Experts, LayerRecord, Linear, Norm, Rotation, Stack
from serve_app.model.sources.skeleton import small_copy, whole_windows
from serve_app.model.sources.source_model import SourceModel
from serve_app.model.verification import verify_model
from tests.models import ARCHITECTURES, needs_compiler, tiny_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma4", "smollm3", "qwen3_moe", "gpt_oss")
"""All that the C kernels run."""

EXACTLY = 2e-4
"""The tolerance of exact mode."""


@dataclass(frozen=True)
class Subject:
    source: SourceModel
    record: DecoderRecord


def subject_of(arch: str) -> Subject:
    source = SourceModel.take(small_copy(tiny_model(arch, torch.float32).config), arch, None)
    return Subject(source, recognise(source.head, source.base, source.facts.layers, source.facts.max_model_len))


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return cpu.pick_kernels(torch.device("cpu"), torch.float32, ModelOptions())


def changes(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A field deleted or changed in every way that another model's could differ, with the names of
    what changed."""
    for part, other in changed_parts(value):
        yield f"{name}.{part}", replace(value, **{part: other})
    match value:
        case bool():
            yield name, not value
        case Activation():
            yield name, Activation.SILU if value is Activation.GELU_TANH else Activation.GELU_TANH
        case float():
            yield name, value * 1.5 if value > 1e-2 else value * 1e3
        case torch.Tensor():
            yield name, value.roll(1, 0) * 0.9
    if value is not None and name in _OPTIONAL:
        yield name, None


def changed_mixture(value: Experts | Stack) -> Iterator[tuple[str, Any]]:
    match value:
        case Experts():
            yield "per_token", value.per_token - 1
            yield "renormalised", not value.renormalised
            for part in ("router", "gate_up", "down"):
                for inner, other in changed_parts(getattr(value, part)):
                    yield part, replace(getattr(value, part), **{inner: other})
            for number in ("alpha", "limit"):
                if getattr(value, number):
                    yield number, getattr(value, number) * 0.5
        case Stack():
            yield "weight", value.weight.roll(1, 0)
            if value.bias is not None:
                yield "bias", None
            if value.interleaved:
                yield "interleaved", False


def changed_parts(value: Any) -> Iterator[tuple[str, Any]]:
    match value:
        case Norm():
            yield "weight", torch.ones_like(value.weight) - value.offset
            yield "offset", 1.0 - value.offset
        case Linear():
            yield "weights", (-value.weights[0], *value.weights[1:])
            if value.biases:
                yield "biases", ()
        case Rotation():
            yield "cos", value.sin
            yield "sin", -value.sin
        case Experts() | Stack():
            yield from changed_mixture(value)
        case AttentionLayer():
            yield "scale", value.scale * 0.7
            yield "sliding_window", None if value.sliding_window else 4


_OPTIONAL = ("attention_out", "mlp_out", "query_norm", "key_norm", "rotation", "factor", "softcap", "sinks")


def changed_records(record: DecoderRecord) -> Iterator[tuple[str, DecoderRecord]]:
    for field in fields(DecoderRecord):
        for name, other in changes(field.name, getattr(record, field.name)):
            yield name, replace(record, **{field.name: other})
    for index, rotation in enumerate(record.rotations):
        for name, other in changes("rotations", rotation):
            yield name, replace(record, rotations=[*record.rotations[:index], other, *record.rotations[index + 1 :]])
    for index in (0, len(record.layers) - 1):
        for name, layer in changed_layers(record.layers[index], is_last=index > 0):
            layers = [*record.layers[:index], layer, *record.layers[index + 1 :]]
            yield f"{name} of layer {index}", replace(record, layers=layers)


def changed_layers(layer: LayerRecord, *, is_last: bool) -> Iterator[tuple[str, LayerRecord]]:
    for field in fields(LayerRecord):
        if field.name == "factor" and is_last:
            continue  # the final norm takes back what the last layer is multiplied by
        for name, other in changes(field.name, getattr(layer, field.name)):
            yield name, replace(layer, **{field.name: other})


@needs_compiler
@pytest.mark.parametrize("arch", FAMILIES)
def test_a_record_with_another_field_is_refused(kernels: Kernels, arch: str) -> None:
    subject = subject_of(arch)
    layers = subject.source.facts.layers

    def verify(record: DecoderRecord) -> None:
        verify_model(
            CpuDecoder(kernels, record, arithmetic=Arithmetic.EXACT), subject.source.reference, layers, EXACTLY
        )

    verify(subject.record)
    accepted = []
    for name, record in changed_records(subject.record):
        try:
            verify(record)
            accepted.append(name)
        except UnsupportedModelError:
            continue
    assert accepted == []


def test_every_field_is_changed() -> None:
    """In one of the families at least."""
    changed = {
        name.split(" ")[0].split(".")[0] for arch in FAMILIES for name, _ in changed_records(subject_of(arch).record)
    }
    assert changed == {field.name for kind in (DecoderRecord, LayerRecord) for field in fields(kind)} - {"layers"}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_all_that_a_file_has_is_random_in_models_that_are_compared(arch: str) -> None:
    """A part that has its default value could be left out unnoticed."""
    tiny = tiny_model(arch, torch.float32)
    for module in (tiny, small_copy(tiny.config)):
        for name, tensor in module.state_dict().items():
            values = tensor.unique()
            assert len(values) > 1 or float(values) not in (0.0, 1.0), name


def test_windows_of_the_small_copy_are_the_models_own_again() -> None:
    config = tiny_model("gemma3", torch.float32).config
    layers = SourceModel.take(small_copy(config), "small", None).facts.layers
    whole = SourceModel.take(tiny_model("gemma3", torch.float32), "whole", None).facts.layers
    assert {layer.sliding_window for layer in layers} == {8, None}
    assert whole_windows(layers, config) == whole
    with pytest.raises(UnsupportedModelError, match="windows that its configuration does not name"):
        whole_windows([replace(layers[0], sliding_window=9)], config)
