"""An answer as a pydantic model, and a choice with probabilities."""

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel


class Fruit(BaseModel):
    """What the model fills in."""

    name: str
    colour: Literal["red", "green", "yellow"]


client = OpenAI(base_url=os.environ.get("SERVE_APP_URL", "http://127.0.0.1:8000") + "/v1", api_key="unused")
model = client.models.list().data[0].id
parsed = client.chat.completions.parse(
    model=model,
    messages=[{"role": "user", "content": "Name a fruit and its colour."}],
    response_format=Fruit,
    temperature=0,
    max_tokens=64,
)
print(parsed.choices[0].message.parsed)

# `odds` is an extension of this server: the probability of each answer.
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Is Paris the capital of France?"}],
    extra_body={"structured_outputs": {"choice": ["yes", "no"], "odds": True}},
)
for entry in (answer.choices[0].model_extra or {})["odds"]:
    print(f"{entry['answer']}: {entry['probability']:.2f}")
