"""One input of every kind, their page, and a folder for a test's own inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report import made_files
from tests.report.pages import Write
from vllm_aiter_mla.commands.report.page import render_page


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One input of every kind, by name."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "status-1-0.json").write_text(json.dumps(made_files.status(shape_timings=[made_files.measured()])))
    made_files.living(folder)
    return {
        "status": folder / "status-1-0.json",
        "kernels": made_files.run_kernels(folder),
        "plan": made_files.write_plan(folder),
        "timing": made_files.write_timing(folder),
        "serving": made_files.write_serving(folder),
    }


@pytest.fixture(scope="session")
def page(files: dict[str, Path]) -> str:
    return render_page([*files.values()])


@pytest.fixture
def written(tmp_path: Path) -> Write:
    def write(name: str, data: Any) -> Path:
        path = tmp_path / name
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return path

    return write
