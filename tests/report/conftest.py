from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.report import made_files
from vllm_aiter_mla.commands.report.page import html_of


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One input of every kind, by name."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "status-1-0.json").write_text(json.dumps(made_files.status(measured=[made_files.measured()])))
    times, accuracy = made_files.write_serving(folder)
    return {
        "kept": made_files.keep_demo(folder / "kept"),
        "status": folder / "status-1-0.json",
        "verify": made_files.run_verify(folder),
        "plan": made_files.run_plan(folder),
        "measure": made_files.write_measure(folder),
        "speed": times,
        "accuracy": accuracy,
    }


@pytest.fixture(scope="session")
def page(files: dict[str, Path]) -> str:
    return html_of([*files.values()])


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str, Any], Path]:
    def write(name: str, data: Any) -> Path:
        path = tmp_path / name
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return path

    return write
