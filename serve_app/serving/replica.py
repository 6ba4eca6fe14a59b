"""One engine replica: an `AsyncEngine` behind a Ray Serve deployment.

Defines what a replica reports (metadata, health, metrics) and how its streams are sent. The engine
decides everything about tokens.
"""

import asyncio
import gc
import logging
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import ray
from ray import serve

from serve_app.checkpoints.model_files import digest_content, locate_model
from serve_app.core.step_record import StepRecord
from serve_app.environment import ENGINE_ENVIRONMENT, bypass_proxies, export
from serve_app.errors import ConfigError
from serve_app.fleet.attempt import STALL_TIMEOUT_S
from serve_app.fleet.link import LINK, MAX_UNSENT_BYTES, LinkServer
from serve_app.fleet.replica_set import REVISION, TOKENIZER
from serve_app.fleet.wire import WireLoad, pack_load
from serve_app.observability.held_bytes import HeldBytes, register_held_bytes
from serve_app.observability.logging import log_to_terminal
from serve_app.observability.metrics import EngineMetrics
from serve_app.observability.step_ring import Recorder, StepRing
from serve_app.serving.auth import admits_to_replicas_metrics
from serve_app.serving.knobs import CHOSEN, live_knobs, scheduler_knobs
from serve_app.serving.ray_patches import bind_replica_port_to_node, node_address
from serve_app.serving.revision import identify, revision_of
from serve_app.serving.scraping import METRICS_ADDRESS, METRICS_KEY, open_metrics_port
from serve_app.settings import Settings
from serve_app.text.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

STEPS_PATH = "/steps"
"""Path on the metrics port: returns the recording of the last `seconds` seconds."""

# How long the event loop may hold the GIL while the engine's thread waits for it, which happens
# many times per step. With Python's default of 5 ms, a step of 16 rows takes 5 % longer.
_SWITCH_INTERVAL_S = 0.0001


def gpu_share() -> float:
    """Return the share of a GPU that Ray assigned to this actor (`num_gpus`), at most 1."""
    share: float = ray.get_runtime_context().get_assigned_resources().get("GPU", 1.0)
    return min(1.0, share)


class EngineReplica:
    """The deployment's class.

    Methods run on the replica's event loop; the engine has its own thread.
    """

    _is_started = False
    """Whether the constructor has returned."""

    async def __init__(self, settings: Settings, *, use_gpu: bool) -> None:  # type: ignore[misc]
        """Load the model. Raises `ConfigError`, which fails the deployment."""
        # Disabled until everything is loaded: the collector would visit half a million lasting
        # objects eight times, for 0.9 s.
        gc.disable()
        export(ENGINE_ENVIRONMENT)
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        # Imported here because it imports torch, which processes that only pass this class on do
        # not need.
        from serve_app.engine.async_engine import AsyncEngine
        from serve_app.engine.core import EngineCore
        from serve_app.serving.engine_config import engine_config, stall_timeout_s

        log_to_terminal()
        bind_replica_port_to_node()
        bypass_proxies(node_address())
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._last_step = 0
        self._metrics = EngineMetrics(ray.get_gpu_ids())
        self._steps = StepRing()
        # In parallel with loading the weights: both mostly wait for reads.
        digesting = asyncio.create_task(asyncio.to_thread(digest_content, locate_model(settings.model)))
        # Before the weights: imports take three times as long while the system allocates the KV
        # pool's memory.
        tokenizer = await asyncio.to_thread(load_tokenizer, settings.model, ignored=settings.ignore_model_keys)
        # Before the engine renders the template in this process to find the end tokens.
        await asyncio.to_thread(tokenizer.check_chat_template)
        build = partial(
            EngineCore.load,
            engine_config(settings, use_gpu=use_gpu, gpu_share=gpu_share(), end_ids=tokenizer.end_ids),
            on_step=self._on_step,
            on_progress=logger.info,
            vocabulary=tokenizer.vocabulary,
        )
        interval_s = settings.ingress.stream_interval_ms / 1000
        self._engine = AsyncEngine(build, stream_interval_s=interval_s, on_first_token=self._metrics.first_token)
        self._links = LinkServer(self._engine.submit, self._engine.abort, self._heartbeat)
        await self._engine.start(self._links.publish)
        chosen = {name: getattr(self._engine.info, name) for name in CHOSEN}
        self._settings = settings = settings.with_chosen(**chosen)
        self._stall_timeout_s = stall_timeout_s(settings, self._engine.info.largest_step_s)
        tokenizer.check_fits(self._engine.info.vocab_size)
        self._identity = identify(
            asdict(self._engine.info),
            weights=await digesting,
            tokenizer=tokenizer.digest,
            deterministic=settings.engine.deterministic,
        )
        self._revision = revision_of(self._identity)
        logger.info("revision %s of %s", self._revision, settings.model)
        self._open_metrics(settings)
        self._link_address = await self._links.listen(node_address())
        gc.freeze()  # otherwise the first collection takes 0.2 s during the first requests
        gc.enable()
        self._is_started = True

    def _open_metrics(self, settings: Settings) -> None:
        self._metrics.read_stats_from(self._engine.stats)
        self._metrics.set_knobs(scheduler_knobs(settings))
        if (limits := self._engine.info.limits) is not None:
            self._metrics.set_limits(limits)
        to_ingress = HeldBytes(self._links.unsent_bytes, MAX_UNSENT_BYTES)
        register_held_bytes(self._metrics.registry, {"outputs_of_a_link": to_ingress})
        pages = {STEPS_PATH: self._recorded_steps}
        self._metrics_key = secrets.token_hex(16)
        admits = admits_to_replicas_metrics(settings.ingress, self._metrics_key)
        self._metrics_address = open_metrics_port(self._metrics.registry, settings.metrics_host, pages, admits)

    async def __del__(self) -> None:
        """Finish the streams that cannot continue on another replica.

        Ray waits for this when it stops the replica. This includes streams that an ingress still
        sends here because it cannot use the new replicas.
        """
        if not self._is_started:
            return  # Ray reports the constructor's error
        try:
            await self.check_health()
        except RuntimeError as error:
            logger.warning("stops at once: %s", error)
        else:
            await self._links.drained()
        self._links.close()

    async def ping(self) -> None:
        """Return when the replica can take requests."""

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the metadata that every router reads once: model, capacity, addresses."""
        return {
            "info": asdict(self._engine.info),
            "model": self._settings.model,
            REVISION: self._revision,
            TOKENIZER: self._identity["tokenizer"],
            "identity": self._identity,
            "max_num_seqs": self._settings.max_slots,
            "prefix_cache": self._settings.engine.enable_prefix_cache,
            METRICS_ADDRESS: self._metrics_address,
            METRICS_KEY: self._metrics_key,
            STALL_TIMEOUT_S: self._stall_timeout_s,
            LINK: (self._link_address, self._links.key),
            "node": node_address(),
            "pid": os.getpid(),
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics for `EnginePolicy`."""
        stats = self._engine.stats()
        return {
            "waiting": float(stats.waiting),
            "running": float(stats.running),
            "slots": float(self._settings.max_slots),
            "kv_usage": stats.blocks_used / stats.blocks_total,
        }

    async def reconfigure(self, user_config: object) -> None:
        """Change the scheduler's knobs. Ray calls this at start and when the `user_config` changes.

        An invalid `user_config` is logged and changes nothing: Ray would stop a replica that
        raises.
        """
        try:
            knobs = live_knobs(self._settings, user_config)
            self._engine.reconfigure(knobs)
            self._metrics.set_knobs(knobs)
        except ConfigError as error:
            logger.error("user_config is refused; the knobs are unchanged: %s", error)

    async def check_health(self) -> None:
        """Raise `RuntimeError` if the engine's thread has ended or its step takes too long."""
        health = self._engine.health()
        if not health.alive:
            raise RuntimeError(f"the engine is dead: {health.error}")
        if health.last_step_age_s is not None and health.last_step_age_s > self._stall_timeout_s:
            raise RuntimeError(f"no engine step for {health.last_step_age_s:.1f} s")

    def _heartbeat(self) -> WireLoad | None:
        return self._load() if self._engine.health().alive else None

    def _load(self) -> WireLoad:
        return pack_load(self._engine.stats(), self._last_step, self._engine.health().last_step_age_s)

    def _on_step(self, record: StepRecord) -> None:
        """Runs in the engine's thread."""
        self._last_step = record.step
        self._metrics.on_step(record)
        self._steps.append(record)

    def _recorded_steps(self, query: Mapping[str, str]) -> bytes:
        """Return the recording of the last `seconds` seconds as JSON.

        Runs in a metrics port thread, so that it answers when requests take all other slots.
        """
        engine = self._engine
        recorder = Recorder(
            replica=self._replica_id,
            num_slots=self._settings.max_slots,
            block_size=engine.info.block_size,
            stats=engine.stats,
            step_age_s=lambda: engine.health().last_step_age_s,
            ring=self._steps,
        )
        return recorder.recording(float(query["seconds"])).to_json()
