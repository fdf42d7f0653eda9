"""What strict mode makes of a failure: tests run in both modes."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from vllm_aiter_mla.settings import SettingsError

both_modes = pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])


def stops(strict: bool, match: str = "strict=true") -> AbstractContextManager[Any]:
    """Check that strict mode stops the block with an error that says ``match``; otherwise nothing may raise."""
    return pytest.raises(SettingsError, match=match) if strict else nullcontext()
