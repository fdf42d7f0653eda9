"""A process can behave as on a machine with AVX2 and without AVX-512: ``make test-avx2`` runs the tests in one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
AVX2 = Path(__file__).with_name("avx2")


def python(*arguments):
    path = os.pathsep.join(filter(None, [str(AVX2), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def on_avx2():
    run = python(str(AVX2 / "rope_child.py"))
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_a_process_as_on_avx2_loads_the_kernels_of_such_a_machine(on_avx2):
    assert on_avx2["capability"] == "AVX2"
    assert on_avx2["libraries"] == ["_C_AVX2.abi3.so"]


def test_loading_an_avx512_library_by_name_ends_with_an_illegal_instruction_as_on_avx2():
    assert python("-c", "import vllm._C").returncode == -signal.SIGILL


@pytest.mark.mutation
def test_mutation_rope_by_vllms_cpu_kernel_is_caught_on_avx2_and_the_sandboxs_is_exact(on_avx2):
    assert on_avx2["sandbox"] == {"NeoX": 0, "GPT-J": 0}
    assert on_avx2["vllms_kernel"]["NeoX"] > 0
