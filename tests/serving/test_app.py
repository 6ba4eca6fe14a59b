"""The application's places: options per device, and GPUs handed out by Ray (logical ones, so no GPU
is needed)."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from serve_app.serving.engine_config import engine_config, stall_timeout_s
from serve_app.settings import Settings
from tests.serving.conftest import NO_MEMORY_MONITOR

OPTIONS = """
import json, sys
from serve_app.app import build, engine_options, ingress_options
from serve_app.settings import Settings
settings = Settings.model_validate(json.loads(sys.argv[1]))
build(settings)
print(json.dumps([{key: options.get(key) for key in ("ray_actor_options", "num_replicas", "max_ongoing_requests")}
                  for options in (engine_options(settings), ingress_options(settings))]))
"""

AUTOSCALING = """
import json, sys
from serve_app.app import build, engine_options, ingress_options
from serve_app.settings import Settings
settings = Settings.model_validate(json.loads(sys.argv[1]))
build(settings)
shown = []
for options in (engine_options(settings), ingress_options(settings)):
    config, policy = options["autoscaling_config"], options["autoscaling_config"].policy
    limits = [config.min_replicas, config.max_replicas, config.upscale_delay_s, config.downscale_delay_s]
    shown.append([limits, policy.policy_function, policy.policy_kwargs, "num_replicas" in options])
print(json.dumps(shown))
"""

PLACEMENT = """
import json, os, ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from serve_app.app import engine_options, use_gpu
from serve_app.settings import Settings

class Probe:
    def where(self):
        return ray.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"]

ray.init(address="local", num_cpus=1, num_gpus=2, include_dashboard=False, object_store_memory=100 * 2**20,
         logging_level="error", log_to_driver=False)
settings = Settings.model_validate({"device": "auto", "num_replicas": 2})
assert use_gpu(settings)
assert not use_gpu(Settings.model_validate({"device": "cpu"}))
# Ray's own router, which spreads calls without a prompt.
options = {**engine_options(settings), "request_router_config": RequestRouterConfig()}
handle = serve.run(serve.deployment(Probe).options(**options).bind(), route_prefix=None)
places = {tuple(map(str, handle.where.remote().result())) for _ in range(40)}
print(json.dumps([sorted(places), ray.available_resources().get("GPU", 0)]))
serve.shutdown()
ray.shutdown()
"""

SHARES = """
import json, ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from serve_app.app import engine_options
from serve_app.serving.replica import gpu_share
from serve_app.settings import Settings

class Probe:
    def __init__(self):
        self.share = gpu_share()  # as a replica does while it starts
    def where(self):
        return ray.get_runtime_context().get_actor_id(), ray.get_gpu_ids(), self.share

ray.init(address="local", num_cpus=1, num_gpus=1, include_dashboard=False, object_store_memory=100 * 2**20,
         logging_level="error", log_to_driver=False)
options = {**engine_options(Settings.model_validate({"device": "cuda", "num_replicas": 2})),
           "request_router_config": RequestRouterConfig(), "ray_actor_options": {"num_cpus": 0, "num_gpus": 0.5}}
handle = serve.run(serve.deployment(Probe).options(**options).bind(), route_prefix=None)
found = {}
while len(found) < 2:
    actor, ids, share = handle.where.remote().result()
    found[actor] = [list(map(str, ids)), share]
print(json.dumps(list(found.values())))
serve.shutdown()
ray.shutdown()
"""


def run(script: str, *arguments: str) -> Any:
    """The list that `script` prints (among lines of Ray's), from a process of its own on
    loopback."""
    environment = {
        **os.environ,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        **NO_MEMORY_MONITOR,
    }
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))


def test_a_replica_takes_a_gpu_when_told_and_no_cpu_slot() -> None:
    args = {"device": "cuda", "num_replicas": 3, "engine": {"max_num_seqs": 4}, "ingress": {"max_queued_requests": 10}}
    engine, ingress = run(OPTIONS, json.dumps(args))
    assert engine["ray_actor_options"] == {"num_cpus": 0, "num_gpus": 1}
    assert engine["num_replicas"] == 3
    assert ingress["ray_actor_options"] == {"num_cpus": 0}
    assert ingress["max_ongoing_requests"] > 3 * 8 + 10


def test_without_a_cluster_auto_means_the_cpu() -> None:
    engine, _ = run(OPTIONS, "{}")
    assert engine["ray_actor_options"] == {"num_cpus": 0, "num_gpus": 0}


def test_autoscaling_takes_the_place_of_a_number() -> None:
    limits = {"min_replicas": 2, "max_replicas": 5, "upscale_delay_s": 3.0, "downscale_delay_s": 60.0}
    engine, ingress = run(AUTOSCALING, json.dumps({"autoscaling": limits, "engine": {"max_num_seqs": 4}}))
    policy = "serve_app.serving.autoscaling"
    assert engine == [[2, 5, 3.0, 60.0], f"{policy}.EnginePolicy", {}, False]
    assert ingress[0][:2] == [1, 1]
    assert ingress[1:] == [f"{policy}.IngressPolicy", {}, False]


def test_threads_are_shared_with_the_replicas_that_may_come() -> None:
    settings = Settings.model_validate({"model": "x", "autoscaling": {"max_replicas": 1024}})
    assert engine_config(settings, use_gpu=False).num_threads == 1
    assert settings.max_ongoing_requests == 1024 * settings.max_ongoing_per_replica


@pytest.mark.cluster
def test_auto_gives_each_replica_a_gpu_of_its_own_where_ray_has_some() -> None:
    places, gpus_left = run(PLACEMENT)
    assert places == [["['0']", "0"], ["['1']", "1"]] or places == [["[0]", "0"], ["[1]", "1"]]
    assert gpus_left == 0


@pytest.mark.cluster
def test_replicas_on_one_gpu_learn_their_shares_of_it() -> None:
    assert run(SHARES) == [[["0"], 0.5]] * 2


def test_the_engine_follows_the_place_and_the_settings() -> None:
    settings = Settings.model_validate(
        {
            "model": "x",
            "ignore_model_keys": ["llama.made_up"],
            "num_replicas": 64,
            "engine": {"max_num_seqs": 4, "policy": "static", "max_model_len": 99, "memory_fraction": 0.5},
        }
    )
    on_cpu, on_gpu = engine_config(settings, use_gpu=False), engine_config(settings, use_gpu=True, gpu_share=0.5)
    assert (on_cpu.model.device, on_gpu.model.device) == ("cpu", "cuda")
    assert (on_cpu.num_threads, on_gpu.num_threads) == (1, None)
    assert (on_cpu.model.max_model_len, on_cpu.policy, on_cpu.max_num_seqs) == (99, "static", 4)
    assert (on_gpu.memory_fraction, on_gpu.gpu_share, on_cpu.gpu_share) == (0.5, 0.5, 1.0)
    assert on_gpu.model.ignore_model_keys == ("llama.made_up",)
    assert on_cpu.max_num_waiting >= settings.max_num_waiting


def test_what_is_automatic_is_left_to_the_engine() -> None:
    config = engine_config(Settings.model_validate({"model": "x"}), use_gpu=False)
    assert (config.auto_slots, config.max_num_seqs) == (True, 256)
    assert (config.auto_step_tokens, config.max_num_batched_tokens) == (True, 8192)
    engine = {"max_num_seqs": 7, "max_num_batched_tokens": 99}
    given = engine_config(Settings.model_validate({"model": "x", "engine": engine}), use_gpu=False)
    assert (given.auto_slots, given.max_num_seqs) == (False, 7)
    assert (given.auto_step_tokens, given.max_num_batched_tokens) == (False, 99)


def test_slow_steps_are_given_their_time_unless_told_otherwise() -> None:
    assert stall_timeout_s(Settings(), 0.5) == 10.0
    assert stall_timeout_s(Settings(), 12.0) == 60.0
    assert stall_timeout_s(Settings.model_validate({"engine": {"stall_timeout_s": 3.0}}), 12.0) == 3.0
