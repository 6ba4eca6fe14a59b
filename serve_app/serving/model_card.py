"""The ingress's description of the model for clients: its names, and what all replicas support."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from serve_app.api.service import ModelCard
from serve_app.fleet.replica_set import REVISION
from serve_app.settings import Settings
from serve_app.text.tokenizer import Tokenizer


def new_card(settings: Settings, tokenizer: Tokenizer) -> ModelCard:
    """Return the card without what the replicas state."""
    names = settings.served_names or (tokenizer.name,)
    return ModelCard(
        names[0],
        max_model_len=0,
        vocab_size=0,
        created=int(time.time()),
        fingerprint="",
        hidden_size=0,
        pooling="last",
        end_ids=(),
        aliases=names[1:],
        any_name=settings.serves_any_name,
    )


def describe_model(card: ModelCard, replicas: Sequence[Mapping[str, Any]]) -> ModelCard:
    """Return `card` with what all of these replicas (given by their metadata) support."""
    revisions = sorted({str(metadata[REVISION]) for metadata in replicas})
    return replace(
        card,
        max_model_len=min(metadata["info"]["max_model_len"] for metadata in replicas),
        vocab_size=min(metadata["info"]["vocab_size"] for metadata in replicas),
        hidden_size=min(metadata["info"]["hidden_size"] for metadata in replicas),
        pooling=replicas[0]["info"]["pooling"],
        end_ids=tuple(replicas[0]["info"]["eos_token_ids"]),
        fingerprint="fp_" + "_".join(revisions),
    )
