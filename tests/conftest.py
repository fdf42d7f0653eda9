"""What holds for every test: property tests check claims, not how fast the machine is; engine tests come last."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

# A deadline of milliseconds fails on a machine that other work shares, on the first call of torch above all.
settings.register_profile("claims", deadline=None, print_blob=True)
settings.load_profile("claims")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines start when collection ends and take minutes; what does not wait for them goes first."""
    # Those with a marker of another kind start what they need themselves, and may do so meanwhile.
    items.sort(key=lambda item: bool(getattr(item.get_closest_marker("engine"), "args", ())))


@pytest.fixture(scope="session")
def load_tool() -> Callable[[str], ModuleType]:
    """Imports ``tools/NAME.py``: the tools are scripts, no package."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent.parent / "tools" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
