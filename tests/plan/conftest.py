"""What the tests of plan share."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from tests.plan.plan_support import ARCH, process
from vllm_aiter_mla.commands.plan import model


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command ask the process that answers for all tests, whatever the card."""
    monkeypatch.setattr(model, "Vllm", lambda arch, variables, verbose: nullcontext(process(ARCH, (), "")))
