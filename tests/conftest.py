"""What holds for every test: property tests check claims, not how fast the machine is; engine tests come last."""

from __future__ import annotations

import pytest
from hypothesis import settings

# A deadline of milliseconds fails on a machine that other work shares, on the first call of torch above all.
settings.register_profile("claims", deadline=None, print_blob=True)
settings.load_profile("claims")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines start when collection ends and take minutes; what does not wait for them goes first."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)
