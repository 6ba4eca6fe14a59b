"""What tests of engines share."""

import pytest

from serve_app.core.autosize import DraftCost
from serve_app.engine import core


@pytest.fixture
def cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are tried whatever an engine would measure at its start, which depends on what else
    the machine does."""
    monkeypatch.setattr(core, "measure_draft_cost", lambda *_: DraftCost(draft_s=(0.02,)))
