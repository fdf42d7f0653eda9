"""hip-python 7 and 10 as their users get them, from the package index: found, called, and told apart from none.

Without the index the tests fail, with pip's last line.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.common import RunError, run_pip
from vllm_aiter_mla.verify import hip_python

CHILD = Path(__file__).with_name("hip_python_child.py")
# In the place of libamdhip64, which no machine without ROCm has: a card, and a dump that shows what arrived.
LIBRARY = r"""
#include <stdio.h>
int hipGetDeviceCount(int *count) { *count = 1; return 0; }
int hipGraphDebugDotPrint(void *graph, const char *path, unsigned int flags) {
  FILE *file = fopen(path, "w");
  if (!file) return 1;
  fprintf(file, "digraph dot {\n\"n\"[shape=\"octagon\" label=\"0\nkernel_%p_%u\n\"];\n}\n", graph, flags);
  return fclose(file);
}
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.wide,  # needs the package index
    pytest.mark.skipif(torch.version.hip is not None, reason="torch's own libamdhip64 would come before the test's"),
]


@pytest.fixture(scope="module", params=["7", "10"])
def release(request, tmp_path_factory):
    """The first number of a release, and a folder that holds it and what it needs."""
    folder = tmp_path_factory.mktemp("hip-python")
    try:
        run_pip("install", "--no-compile", "--target", str(folder), f"hip-python=={request.param}.*")
    except RunError as error:
        pytest.fail(f"the package index gave no hip-python {request.param}: {error}", pytrace=False)
    yield request.param, folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    command = ["cc", "-shared", "-fPIC", "-xc", "-", "-o", str(folder / "libamdhip64.so")]
    subprocess.run(command, input=LIBRARY, text=True, check=True)
    return folder


def child(release, library):
    """What the child prints with this release and the libamdhip64 in ``library``."""
    env = {name: value for name, value in os.environ.items() if name not in ("ROCM_PATH", "ROCM_HOME")}
    env["PYTHONPATH"] = os.pathsep.join([str(release[1]), env["PYTHONPATH"]])
    env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(library), env.get("LD_LIBRARY_PATH")]))
    done = subprocess.run([sys.executable, str(CHILD)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_hip_python_is_found_and_reads_the_launches_of_a_graph(release, library):
    said = child(release, library)
    assert said["problem"] is None
    assert said["version"].startswith(f"{release[0]}.")
    assert said["calls"] == list(hip_python.CALLS)
    assert said["launches"] == ["kernel_0x1234_0"], "address and flags arrive as they were given"


def test_hip_python_without_a_driver_is_not_taken_for_absent(release, tmp_path):
    # An empty file: no driver, also on a machine that has one.
    (tmp_path / "libamdhip64.so").touch()
    said = child(release, tmp_path)
    assert said["problem"] is None
    assert "launches" not in said
    assert "libamdhip64" in said["error"]
    assert said["version"] in said["error"]
    assert "not installed" not in said["error"]
    assert "pip install" not in said["error"], "another release has no driver either"
