"""The protocol of executors whose weights are read directly from their files."""

from typing import TYPE_CHECKING, Protocol

import torch

from serve_app.model.executor import ModelExecutor
from serve_app.model.options import Progress
from serve_app.model.sources.blueprint import Blueprint
from serve_app.model.sources.mapped_checkpoint import MappedCheckpoint

if TYPE_CHECKING:
    from serve_app.model.sources.source_model import SourceModel  # imports transformers' modules


class Target(Protocol):
    """What a mapped model is loaded for: kernels on a device, and their layout of weights."""

    @property
    def device(self) -> torch.device:
        """The device that runs the model."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        ...

    @property
    def reference_dtype(self) -> torch.dtype:
        """The dtype in which transformers' modules run the narrow copy, on the device."""
        ...

    @property
    def build(self) -> str:
        """Identifies the code that was verified."""
        ...

    def verify(self, small: "SourceModel") -> None:
        """Verify the kernels on a narrow copy. Raises UnsupportedModelError."""
        ...

    def load(self, blueprint: Blueprint, checkpoint: MappedCheckpoint, report: Progress) -> ModelExecutor:
        """Build the model. Raises UnsupportedModelError, and ConfigError for weights that are
        missing, not finite, or too large.
        """
        ...
