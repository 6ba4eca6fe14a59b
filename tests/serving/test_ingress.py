"""What an ingress waits for when it starts, and what it says of its replicas. No cluster."""

import asyncio
import warnings
from pathlib import Path

import pytest

from serve_app.api.service import ModelCard
from serve_app.errors import ConfigError
from serve_app.fleet.replica_set import ReplicaSet
from serve_app.settings import Settings
from tests.text.test_gguf_tokenizer import changed

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own modules
    from serve_app.serving.ingress import load_tokenizer_of, wait_for_replica
    from serve_app.serving.model_card import describe_model

OURS, THEIRS = {"tokenizer": "ours"}, {"tokenizer": "theirs"}


async def test_an_ingress_waits_for_replicas_that_have_its_tokenizer() -> None:
    replicas = ReplicaSet("ours")
    replicas.publish({"a": THEIRS})
    waiting = asyncio.create_task(wait_for_replica(replicas, 20))
    await asyncio.sleep(0)
    replicas.publish({"a": THEIRS, "b": THEIRS})
    await asyncio.sleep(0)
    assert not waiting.done()
    replicas.publish({"b": THEIRS, "c": OURS})
    await waiting


async def test_an_ingress_says_what_it_waited_for_in_vain() -> None:
    replicas = ReplicaSet("ours")
    replicas.publish({"a": THEIRS})
    with pytest.raises(TimeoutError, match="no engine replica with the tokenizer of this model within 0 s"):
        await wait_for_replica(replicas, 0)


def test_a_model_is_described_by_what_all_its_replicas_can_do() -> None:
    card = ModelCard("m", 0, vocab_size=0, created=7, fingerprint="", hidden_size=0, pooling="last", end_ids=())
    kinds = {"hidden_size": 64, "pooling": "mean", "eos_token_ids": [5, 6]}
    old = {"revision": "a", "info": {"max_model_len": 4096, "vocab_size": 90, **kinds}}
    new = {"revision": "b", "info": {"max_model_len": 2048, "vocab_size": 96, **kinds}}
    assert describe_model(card, [old, old]) == ModelCard("m", 4096, 90, 7, "fp_a", 64, "mean", (5, 6))
    assert describe_model(card, [new, old]) == ModelCard("m", 2048, 90, 7, "fp_a_b", 64, "mean", (5, 6))


def test_the_operator_may_load_a_tokenizer_without_a_key_that_is_not_supported(tmp_path: Path) -> None:
    path = str(changed(tmp_path, made_up=1))
    with pytest.raises(ConfigError, match="made_up"):
        load_tokenizer_of(Settings(model=path))
    assert load_tokenizer_of(Settings(model=path, ignore_model_keys=["tokenizer.ggml.made_up"])).encode("Hello")
