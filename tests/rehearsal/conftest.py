"""Days for all rehearsals."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rehearsal.day import Day


@pytest.fixture(scope="session")
def inductor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled C++ kernels, found again by their source."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture
def made(tmp_path: Path, inductor: Path) -> Callable[..., Day]:
    """How to make a day; by default on a healthy MI300X: vLLM's own kernels take 10 us, AITER's 8 and Triton's 5."""
    return lambda scenario=None, **how: Day(tmp_path, scenario, inductor, **how)


@pytest.fixture
def day(made: Callable[..., Day]) -> Day:
    return made()
