"""The scheduler's knobs: from the settings at start, from Serve's `user_config` at run time.

Parses and validates a `user_config`. The scheduler defines which knobs may change at run time.
"""

from collections.abc import Mapping
from dataclasses import fields

from serve_app.core.config import LIVE_KNOBS, SchedulerKnobs
from serve_app.errors import ConfigError
from serve_app.settings import Settings, suggest

CHOSEN = ("max_num_seqs", "max_num_batched_tokens")
"""Knobs that the engine chooses at start if they are `auto`."""


def scheduler_knobs(settings: Settings) -> SchedulerKnobs:
    """Return the configured knobs, with the maximum for `auto`.

    Raises `ConfigError` if knobs conflict.
    """
    knobs = {field.name: getattr(settings.engine, field.name) for field in fields(SchedulerKnobs)}
    chosen = {"max_num_seqs": settings.max_slots, "max_num_batched_tokens": settings.most_step_tokens}
    return SchedulerKnobs(**knobs | chosen)


def live_knobs(settings: Settings, user_config: object) -> SchedulerKnobs:
    """Return the knobs of an engine built with `settings`, changed by `user_config`.

    Knobs that are missing or `auto` keep the value the engine was built with. Raises `ConfigError`
    naming the key.
    """
    if not isinstance(user_config, Mapping):
        raise ConfigError(f"user_config must be a mapping of scheduler knobs, got {user_config!r}")
    for key in user_config:
        if key not in LIVE_KNOBS:
            raise ConfigError(
                f"user_config: `{key}` cannot change in a running engine {suggest(str(key), list(LIVE_KNOBS))}"
            )
    given = {key: value for key, value in user_config.items() if key not in CHOSEN or value != "auto"}
    engine = {**settings.engine.model_dump(), **given}
    changed = Settings.model_validate({**settings.model_dump(exclude_unset=True), "engine": engine})
    knobs = scheduler_knobs(changed)
    scheduler_knobs(settings).check_change(knobs)
    return knobs
