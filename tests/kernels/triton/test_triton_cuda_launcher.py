"""The launch past Triton's dispatch on sm90: Triton's real launcher hands the driver what it does after the dispatch.

A libcuda that writes down launches takes the place of the driver; ``test_triton_launcher.py`` is the twin for ROCm.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.triton.cuda_launches import CASES, STAND_IN

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="Triton builds its launcher with a C compiler")


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """What the process that launches says."""
    command = [sys.executable, "-m", "tests.kernels.triton.cuda_launches", str(tmp_path_factory.mktemp("cuda"))]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def seen(answer):
    """What the driver got of each case, by its label."""
    return {case["case"]: case for case in answer["cases"]}


def differences(found):
    """Names of what the two launches of one ``Launch`` gave differently, but for the output, which is new each time."""
    dispatched, direct = ({**one, **one["arguments"], "out_ptr": None, "arguments": None} for one in found["launched"])
    assert dispatched.keys() == direct.keys()
    return {name for name in dispatched if dispatched[name] != direct[name]}


@pytest.mark.parametrize("label", [case.label() for case in CASES])
def test_triton_cuda_launcher_gives_past_the_dispatch_what_the_dispatch_gives(seen, label):
    found = seen[label][""]
    assert (found["launches"], found["dispatches"]) == (2, 1)
    assert differences(found) == set()


@pytest.mark.parametrize("label", [case.label() for case in CASES])
def test_triton_cuda_launcher_gives_the_driver_the_operands_by_their_names(seen, label):
    found = seen[label][""]
    for launched, out in zip(found["launched"], found["outs"], strict=True):
        given = launched["arguments"]
        assert {name: given[name] for name in found["arguments"]} == found["arguments"]
        assert given["out_ptr"] == out
        assert (given["global_scratch"], given["profile_scratch"]) == (0, 0)
        assert launched["grid"] == [found["grid"], 1, 1]
        assert launched["block"] == [found["threads"], 1, 1]
        assert 0 < launched["shared"] <= 227 * 1024


@pytest.mark.mutation
@pytest.mark.parametrize(("plant", "told"), [("another grid", {"grid"}), ("swapped pointers", {"q_ptr", "k_pe_ptr"})])
def test_triton_mutation_cuda_launcher_with_a_wrong_direct_launch_is_caught(seen, plant, told):
    found = seen[CASES[0].label()][plant]
    assert (found["launches"], found["dispatches"]) == (2, 1)
    assert differences(found) == told
    right, wrong = found["launched"]
    if plant == "another grid":
        assert wrong["grid"][0] == right["grid"][0] + 1
    else:
        assert wrong["arguments"]["q_ptr"] == right["arguments"]["k_pe_ptr"] == found["arguments"]["k_pe_ptr"]


def test_triton_cuda_launcher_gets_two_launches_of_the_stand_in_for_vllms_kernels(answer):
    assert len(answer["stand-in"]) == len(STAND_IN)
    for found in answer["stand-in"]:
        assert (found["launches"], found["last"]["grid"]) == (2, [found["rows"], 1, 1])
        assert found["last"]["arguments"]["out_ptr"] == found["out"]
