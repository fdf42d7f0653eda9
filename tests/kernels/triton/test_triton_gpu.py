"""The kernel on a GPU, beside what tests/verify/test_verify_gpu.py replays in graphs. ``pytest -m gpu -k triton``."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.kernels.triton.triton_mutations import CASES
from tests.support.triton_cases import Case, build, compare, on_cpu, wrong_values

pytest.importorskip("triton")

from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.platform import CARDS
from vllm_aiter_mla.kernels.triton.backend import TritonBackend

pytestmark = pytest.mark.gpu
BACKEND = TritonBackend()
# Summation order moves few bfloat16 roundings; a mutant moves far more (test_triton_interpreter.py).
NOPE_FRACTION = 0.005
# Reported as a failure of this very file, so that a run inside compute-sanitizer does not start another one.
INSIDE_SANITIZER = "TRITON_TESTS_IN_SANITIZER"


def on_gpu(case):
    native = str(CARDS.get(TritonBackend().arch)).removeprefix("torch.")
    return build(replace(case, cache=native if case.cache.startswith("float8") else case.cache), device="cuda")


SHAPES = [
    Case(tokens=t, heads=n, block_size=b)
    for t, n, b in [(1, 1, 1), (7, 16, 64), (16, 8, 16), (33, 16, 1), (64, 128, 64), (129, 16, 16), (300, 128, 64)]
]


@pytest.mark.parametrize("case", SHAPES + [case for case in CASES if case.weight == "plain"], ids=Case.label)
def test_triton_gpu_writes_the_bytes_of_the_reference(case):
    inputs, storage = on_gpu(case)
    assert BACKEND.refuse(inputs) is None
    found = compare(inputs, storage, BACKEND.prepare)
    assert found["wrong_rope"] == 0
    assert found["wrong_cache"] == 0, "cache, its untouched rows and the guards around it"
    assert found["nope_different"] <= NOPE_FRACTION
    assert found["bmm_bound"] <= 1.0


def test_triton_gpu_call_neither_synchronises_nor_allocates_but_the_query():
    inputs, _ = on_gpu(Case(tokens=64, heads=16))
    BACKEND.prepare(inputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        BACKEND.prepare(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 1


def test_triton_gpu_capture_without_warm_up_raises():
    inputs, _ = on_gpu(Case(tokens=5, heads=11))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="call warm_up before"), torch.cuda.graph(graph):
        BACKEND.prepare(inputs)


@pytest.mark.parametrize("cache", [Case.cache, "bfloat16"])
def test_triton_gpu_cache_rows_beyond_four_gib_land_where_they_belong(cache):
    inputs, storage = on_gpu(Case(tokens=4, heads=1, no_slot="none", cache=cache))
    item = inputs.kv_cache.dtype.itemsize
    blocks = (5 << 30) // (64 * 576 * item)
    raw = torch.zeros(blocks * 64 * 576 * item, dtype=torch.uint8, device="cuda")
    rows = [3, (2 << 30) // (576 * item) + 5, (4 << 30) // (576 * item) + 7, blocks * 64 - 1]
    inputs = replace(inputs, slot_mapping=torch.tensor(rows, device="cuda"))
    cpu, _ = on_cpu(inputs, storage)
    inputs = replace(inputs, kv_cache=raw.view(inputs.kv_cache.dtype).view(blocks, 64, 576))
    BACKEND.prepare(inputs)
    cos, sin = reference.gather_cos_sin(cpu.cos_sin_cache, cpu.positions)
    expected = reference.kv_rows(cpu, cos, sin, reference.TRITON)
    assert wrong_values(inputs.kv_cache.view(-1, 576)[rows].cpu(), expected) == 0
    assert int(raw.count_nonzero()) == int(expected.view(torch.uint8).count_nonzero()), "nothing else was written"


@pytest.mark.skipif(INSIDE_SANITIZER in os.environ, reason="this is the run inside compute-sanitizer")
def test_triton_gpu_shapes_are_clean_under_compute_sanitizer():
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q", "-x"]
    command += ["-m", "gpu", "-k", "bytes_of_the_reference", str(Path(__file__))]
    # Freed blocks that stay with torch's allocator would hide an access beyond an operand.
    environment = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1", **{INSIDE_SANITIZER: "1"})
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.skipif(INSIDE_SANITIZER in os.environ, reason="this is the run inside compute-sanitizer")
def test_triton_gpu_measure_finds_no_wrong_kernel_and_finishes():
    pytest.importorskip("vllm")
    from rich.console import Console

    from vllm_aiter_mla.commands.check.timing import child, printout

    found = child.time_layers(child.TimingRequest((1, 8, 64, 256), (16,), ("fp8",)), {})
    printout.print_record(found, Console())
    assert (found.failed_kernels, found.stop_reason) == ({}, "")
