"""A process can behave as on another processor: without AVX-512, with AMX or without.

``make test-avx2`` runs all tests without AVX-512, ``make amx-quick`` those that build vLLM's configs.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).with_name("processor")


def python(*arguments, processor="avx2"):
    path = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "AITER_MLA_PROCESSOR": processor}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def on_avx2():
    run = python(str(FOLDER / "rope_child.py"))
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_a_process_as_on_avx2_loads_the_kernels_of_such_a_machine(on_avx2):
    assert on_avx2["capability"] == "AVX2"
    assert on_avx2["libraries"] == ["_C_AVX2.abi3.so"]


def test_loading_an_avx512_library_by_name_ends_with_an_illegal_instruction_as_on_avx2():
    assert python("-c", "import vllm._C").returncode == -signal.SIGILL


AMX = "import torch; print(torch.cpu._is_amx_tile_supported())"


@pytest.mark.parametrize(("processor", "answer"), [("amx", "True"), ("no-amx", "False"), ("avx2", "False")])
def test_torch_says_whether_the_processor_has_amx(processor, answer):
    assert python("-c", AMX, processor=processor).stdout.strip() == answer


def test_the_sandbox_sees_no_amx_on_a_processor_that_has_it():
    seen = f"from tests.sandbox import platform; platform.see_no_amx(); {AMX}"
    assert python("-c", seen, processor="amx").stdout.strip() == "False"


TWICE = "import torch; x = torch.arange(64.0).bfloat16(); print(torch.compile(lambda x: x.float() * 2)(x).sum().item())"


@pytest.mark.wide
def test_a_graph_that_this_processor_compiled_is_not_found_on_avx2(tmp_path, monkeypatch):
    """Inductor would compile another vector unit's loops for AVX2, and leave half of the values unwritten."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    here = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True)
    assert here.stdout.strip() == python("-c", TWICE).stdout.strip() == "4032.0"
    assert len(list(tmp_path.glob("torchinductor*"))) == 2


@pytest.mark.mutation
def test_mutation_rope_by_vllms_cpu_kernel_is_caught_on_avx2_and_the_sandboxs_is_exact(on_avx2):
    assert on_avx2["sandbox"] == {"NeoX": 0, "GPT-J": 0}
    assert on_avx2["vllms_kernel"]["NeoX"] > 0
