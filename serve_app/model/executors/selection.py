"""Selects the executor of a model: the first that is wanted and can run it. Each executor decides
both.
"""

import logging
from typing import Protocol

from serve_app.errors import ConfigError
from serve_app.model.executor import Demand, ModelExecutor, UnsupportedModelError
from serve_app.model.executors import cpu, gpu, transformers
from serve_app.model.facts import ModelFacts
from serve_app.model.options import ModelOptions, Progress
from serve_app.model.sources.source_model import SourceModel

logger = logging.getLogger(__name__)


class _Kind(Protocol):
    """The module of one kind of executor. NAME: its name in messages."""

    NAME: str

    def demand(self, facts: ModelFacts, options: ModelOptions) -> Demand:
        """Whether the options call for this kind."""
        ...

    def load(self, source: SourceModel, options: ModelOptions, report: Progress) -> ModelExecutor:
        """Build the executor and verify it against the source's logits. Raises
        UnsupportedModelError.
        """
        ...


_KINDS: tuple[_Kind, ...] = (cpu, gpu, transformers)
"""The kinds in the order in which they are tried."""


def pick_executor(source: SourceModel, options: ModelOptions, report: Progress) -> ModelExecutor:
    """Return the executor of `try_executors`."""
    return try_executors(source, options, report)[0]


def try_executors(source: SourceModel, options: ModelOptions, report: Progress) -> tuple[ModelExecutor, str]:
    """Build and verify the model's executor. Also return why a faster one cannot run it, or an
    empty text.

    Logs why a faster executor cannot run the model. Raises ConfigError if a required executor
    cannot, or if none can.
    """
    name, reason = source.facts.name, ""
    report("optimizing", 0.0)
    for kind in _KINDS:
        demand = kind.demand(source.facts, options)
        if demand is Demand.NONE:
            continue
        try:
            return kind.load(source, options, report), reason
        except UnsupportedModelError as error:
            if demand is Demand.REQUIRED:
                raise ConfigError(f"model {name}: {kind.NAME} cannot run it: {error}") from error
            reason = str(error)
            logger.warning("model %s: runs without %s: %s", name, kind.NAME, error)
    raise ConfigError(f"model {name}: no executor can run it")
