"""Which executor runs a model: the first that is wanted and can. Each of them says so itself."""

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
    """A module of this package that stands for one kind of executor. NAME: in messages."""

    NAME: str

    def demand(self, facts: ModelFacts, options: ModelOptions) -> Demand:
        """Whether the options want this kind."""
        ...

    def load(self, source: SourceModel, options: ModelOptions, report: Progress) -> ModelExecutor:
        """Built, and verified against the source's logits. Raises UnsupportedModelError."""
        ...


_KINDS: tuple[_Kind, ...] = (cpu, gpu, transformers)
"""In the order in which they are tried."""


def pick_executor(source: SourceModel, options: ModelOptions, report: Progress) -> ModelExecutor:
    """Build the executor that is to run the model, and verify it.

    Where a faster one cannot, the log says why. Raises ConfigError when one is required that cannot, or none can.
    """
    name = source.facts.name
    report("optimizing", 0.0)
    for kind in _KINDS:
        demand = kind.demand(source.facts, options)
        if demand is Demand.NONE:
            continue
        try:
            return kind.load(source, options, report)
        except UnsupportedModelError as error:
            if demand is Demand.REQUIRED:
                raise ConfigError(f"model {name}: {kind.NAME} cannot run it: {error}") from error
            logger.warning("model %s: runs without %s: %s", name, kind.NAME, error)
    raise ConfigError(f"model {name}: nothing can run it")
