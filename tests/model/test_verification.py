"""How far an executor's logits are from the reference: noise of any width passes, one wrong token does not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from serve_app.model import verification
from serve_app.model.executors.base import UnsupportedModelError
from serve_app.model.verification import ReferenceLogits, verify_model

NOISE = 0.1


def reference(vocab: int) -> ReferenceLogits:
    generator = torch.Generator().manual_seed(0)
    lengths = (3, 5)
    return ReferenceLogits(
        [torch.arange(length) for length in lengths],
        [3 * torch.randn(length, vocab, generator=generator) for length in lengths],
    )


@pytest.fixture
def difference(monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """Of logits that an executor would have given."""

    def measured(known: ReferenceLogits, got: list[Tensor]) -> float:
        monkeypatch.setattr(verification, "_run", lambda *_: got)
        executor: Any = None
        return known.difference(executor, ())

    return measured


@pytest.mark.parametrize("vocab", [500, 50_000])
def test_noise_counts_alike_in_every_vocabulary(vocab: int, difference: Callable[..., float]) -> None:
    known = reference(vocab)
    got = [row + NOISE * row.std() * torch.randn(row.shape) for row in known.logits]
    assert difference(known, got) == pytest.approx(NOISE, rel=0.2)


def test_one_wrong_token_is_not_hidden_by_the_others(difference: Callable[..., float]) -> None:
    known = reference(500)
    got = [row.clone() for row in known.logits]
    got[1][4] = got[1][3]
    assert difference(known, got) > 1


def test_no_number_is_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    known = reference(500)
    got = [row.clone() for row in known.logits]
    got[0][1, 7] = torch.nan
    monkeypatch.setattr(verification, "_run", lambda *_: got)
    executor: Any = None
    with pytest.raises(UnsupportedModelError, match="would differ by nan"):
        verify_model(executor, known, (), 1.0)
