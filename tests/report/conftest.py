from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.report.report_support import DATA, engine_result, made_up_bench, made_up_measurements
from vllm_aiter_mla.commands.report.render import html_of


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as ``demo --quick --keep`` left it, its graphs cut to one layer."""
    folder = tmp_path_factory.mktemp("kept") / "kept"
    folder.mkdir()
    graphs = {name: (DATA / f"{name}.fx.txt").read_text() for name in ("vllm", "fused")}
    (folder / "demo.json").write_text((DATA / "demo.json").read_text())
    status = [json.loads((DATA / "status.json").read_text())]
    off = engine_result({"1-16": graphs["vllm"], "17-64": graphs["vllm"]}, [])
    on = engine_result({"1-16": graphs["fused"], "17-64": graphs["vllm"]}, status)
    (folder / "run0-off.json").write_text(json.dumps(off))
    (folder / "run0-on.json").write_text(json.dumps(on))
    return folder


@pytest.fixture(scope="session")
def bench_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bench file with made-up figures: its machine says so."""
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    path.write_text(json.dumps(made_up_bench()))
    return path


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What the tools write, with made-up figures: the machine says so."""
    folder = tmp_path_factory.mktemp("measured")
    for name, data in made_up_measurements().items():
        (folder / name).write_text(json.dumps(data))
    return sorted(folder.iterdir())


@pytest.fixture(scope="session")
def page(kept: Path, bench_json: Path, measured: list[Path]) -> str:
    return html_of([kept, bench_json, DATA / "verify.json", *measured])


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str, Any], Path]:
    def write(name: str, data: Any) -> Path:
        path = tmp_path / name
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return path

    return write
