"""How far an executor's logits are from the reference: noise of any width passes, one wrong token
does not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from serve_app.model import verification
from serve_app.model.executor import UnsupportedModelError
from serve_app.model.verification import ReferenceLogits, verify_model

NOISE = 0.1


def reference(vocab: int) -> ReferenceLogits:
    generator = torch.Generator().manual_seed(0)
    lengths = (3, 5)
    return ReferenceLogits(
        [torch.arange(length) for length in lengths],
        [3 * torch.randn(length, vocab, generator=generator) for length in lengths],
    )


EXECUTOR: Any = None
"""Its logits are what `gives` was told."""


@pytest.fixture
def gives(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Tensor]], None]:
    return lambda logits: monkeypatch.setattr(verification, "_run", lambda *_: logits)


@pytest.mark.parametrize("vocab", [500, 50_000])
def test_noise_counts_alike_in_every_vocabulary(vocab: int, gives: Callable[[list[Tensor]], None]) -> None:
    known = reference(vocab)
    gives([row + NOISE * row.std() * torch.randn(row.shape) for row in known.logits])
    assert known.difference(EXECUTOR, ()) == pytest.approx(NOISE, rel=0.2)


def test_one_wrong_token_is_not_hidden_by_the_others(gives: Callable[[list[Tensor]], None]) -> None:
    known = reference(500)
    got = [row.clone() for row in known.logits]
    got[1][4] = got[1][3]
    gives(got)
    assert known.difference(EXECUTOR, ()) > 1


def test_what_all_logits_of_a_token_differ_by_changes_nothing(gives: Callable[[list[Tensor]], None]) -> None:
    known = reference(500)
    gives([row + 10 * torch.randn(len(row), 1) for row in known.logits])
    assert known.difference(EXECUTOR, ()) < 1e-5


def test_no_number_is_no_agreement(gives: Callable[[list[Tensor]], None]) -> None:
    known = reference(500)
    got = [row.clone() for row in known.logits]
    got[0][1, 7] = torch.nan
    gives(got)
    with pytest.raises(UnsupportedModelError, match="would differ by nan"):
        verify_model(EXECUTOR, known, (), 1.0)
