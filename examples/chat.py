"""A streamed chat with OpenAI's client."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("SERVE_APP_URL", "http://127.0.0.1:8000") + "/v1", api_key="unused")
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name the capital of France."}],
    temperature=0,
    max_tokens=64,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage is not None:
        print(f"\n({chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} output tokens)")
