"""The real server once through, for `make test`: a chat, a stream that outlives its replica, an
orderly end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

from tests.serving.conftest import Server
from tests.serving.test_server import body, completion_of, streamed


def test_a_server_from_its_start_to_its_end(start: Callable[..., Server], tiny_folder: Path) -> None:
    args: dict[str, Any] = {"model": str(tiny_folder), "served_model_name": "tiny", "device": "cpu"}
    server = start({**args, "engine": {"max_num_seqs": 8, "kv_cache_gib": 0.05, "num_threads": 1}})
    server.wait_ready()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    hello: Any = {"role": "user", "content": "Hello"}
    chat = client.chat.completions.create(model="tiny", messages=[hello], max_tokens=8)
    assert chat.usage is not None
    assert 1 <= chat.usage.completion_tokens <= 8
    request = body(max_tokens=4000, logprobs=1)
    undisturbed = completion_of(streamed(server, "completions", request, lambda: None))
    [replica] = server.running("EngineReplica")
    assert completion_of(streamed(server, "completions", request, replica.kill)) == undisturbed
    assert server.metrics()["serve_app_failovers_total"] == 1
    assert server.stop() == (0, [])
