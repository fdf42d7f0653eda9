"""``vllm-aiter-mla status``: one line for each engine, and an exit status for scripts."""

import json

import pytest
from typer.testing import CliRunner

from vllm_aiter_mla.commands.main import app
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.status import record_of

NAMES = ("model.layers.0.attn", "model.layers.1.attn")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(compat_config, "cache_folder", lambda: tmp_path)
    return tmp_path


def write(folder, run, engine, rank, engaged=NAMES):
    record = record_of(NAMES, 512, "fp8", rank) | {"run": run, "engine": engine, "model_name": "r1"}
    record |= {"engaged": dict.fromkeys(engaged, "triton")}
    record["skipped"] = {name: ["kernel_shape", "wrong"] for name in NAMES if name not in engaged}
    (folder / f"status-{run}-{engine}-{rank}.json").write_text(json.dumps(record))


def run():
    return CliRunner().invoke(app, ["status"])


def test_each_data_parallel_engine_of_a_server_has_its_line(folder):
    for engine in ("0", "1"):
        for rank in (0, 1):
            write(folder, "7-a", engine, rank)
    found = run()
    assert found.exit_code == 0
    assert [line.split(": ")[1].split(" (")[0] for line in found.output.splitlines()] == [
        "2/2 MLA layers engaged on 2 of 2 ranks"
    ] * 2


@pytest.mark.parametrize("engaged", [(), NAMES[:1]])
def test_a_rank_that_fell_back_is_exit_status_1(folder, engaged):
    write(folder, "7-a", "0", 0)
    write(folder, "7-a", "0", 1, engaged)
    found = run()
    assert found.exit_code == 1
    assert "rank 1 fell back: kernel_shape: wrong" in found.output


@pytest.mark.parametrize("content", [None, "half a fi", "{}"])
def test_no_file_or_a_broken_one_is_exit_status_2(folder, content):
    if content is not None:
        (folder / "status-7-a-0-0.json").write_text(content)
    assert run().exit_code == 2
