"""What holds for every test: property tests check claims, not how fast the machine is; engine tests come last."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

# Processes that tests start find the checkout: `tests`, `tools` and this tree's package.
ROOT = str(Path(__file__).parents[1])
if ROOT not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))

# A deadline of milliseconds fails on a machine that other work shares, on the first call of torch above all. The same
# examples in each run: what fails in one fails in the next.
settings.register_profile("claims", deadline=None, derandomize=True, database=None)
settings.load_profile("claims")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines start when collection ends and take minutes; what does not wait for them goes first."""
    # Those with a marker of another kind start what they need themselves, and may do so meanwhile.
    items.sort(key=lambda item: bool(getattr(item.get_closest_marker("engine"), "args", ())))


@pytest.fixture
def fake_gfx942() -> Iterator[None]:
    """An AITER that can be imported and behaves as on an MI300X, with no call recorded."""
    from tests.sandbox.simulated_aiter import install, op

    with install("gfx942"):
        op.forget()
        yield


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
