"""What a launch costs, counted in the executed code: the bounds, and that bugs in the kernel's order are noticed."""

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tools.gfx9 import cost

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
ARCHS = ("gfx942", "gfx950")
# Each plants text in the kernel's source and names the bounds that have to break, all that do.
PLANTED_TEXT = {
    "late scale": ("acc *= weight_scale", "acc *= tl.load(w_scale_ptr)", ["query tile program"]),
    "late rows": ("    x = tl.load(src, mask=loaded[:, None], other=0.0)\n    slot = ",
     "    slot = tl.load(slot_ptr + rows, mask=loaded, other=-1)\n"
     "    x = tl.load(src, mask=(slot >= 0)[:, None], other=0.0)\n    slot = ", ["KV latent program"]),
    "heads last": ("        rest = pid // N\n        head = pid - rest * N\n",
     "        rest = pid % (token_blocks * latent_tiles)\n        head = pid // (token_blocks * latent_tiles)\n",
     ["bytes moved"]),
}  # fmt: skip
SECOND_CLAMP = ("tl.clamp(x, -limit, limit)", "tl.clamp(saturated(x, 3e38), -limit, limit)")
TIGHT = min(release for release, bounds in cost.GFX942_US.items() if "plain" in bounds)
# Tokens, heads and weight of what is counted.
POINT, LARGE_POINTS = (64, 16, "fp8"), ((512, 128, "plain"), (512, 128, "fp8"))
POINTS = (POINT, *LARGE_POINTS)
# Each replaces a function of the kernel by that of ``kernel_planted``.
PLANTED_FUNCTIONS = {
    "scattered store": ("_store_columns", ["a store request of a query tile program"]),
    "sunk load": ("debug_barrier", ["KV rope program", "KV latent program"]),
}
RUN = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from tests.tools.gfx9 import kernel_planted
from tools import aot
from tools.gfx9 import cost
from vllm_aiter_mla.kernels.triton import kernel

arch, chosen, old, new, function = sys.argv[1:]
if function:
    place = kernel if hasattr(kernel, function) else kernel.tl
    setattr(place, function, getattr(kernel_planted, function))
if old:
    source = Path(kernel.__file__).read_text()
    assert source.count(old) == 1, old
    path = Path(sys.argv[0]).with_name("kernel_with_text.py")
    path.write_text(source.replace(old, new))
    sys.path.insert(0, str(path.parent))
    import kernel_with_text as changed
    kernel.decode_prep_kernel = changed.decode_prep_kernel
points = cost.points(arch)
if chosen:
    points = [(v, t) for v, t in points if [t, v.heads, v.weight] in json.loads(chosen) and not v.is_neox]
costs = cost.count(aot.TARGETS[arch], points)
print(json.dumps({"breaches": cost.breaches(arch, costs), "costs": [asdict(one) for one in costs]}))
"""


def count(folder, arch, old="", new="", function="", points=(POINT,)):
    """Count in a process of its own, which compiles for one card; Triton's cache does not see what is planted."""
    script = folder / "count.py"
    script.write_text(RUN)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), arch, json.dumps(points) if points else "", old, new, function]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("arch", ["gfx942", pytest.param("gfx950", marks=pytest.mark.wide)])
def test_kernel_cost_keeps_its_bounds_where_planted_bugs_break_them(tmp_path, arch):
    found = count(tmp_path, arch, points=POINTS)
    assert {(one["tokens"], one["heads"], one["weight"]) for one in found["costs"]} == {*POINTS}
    assert found["breaches"] == []


@pytest.mark.wide
@pytest.mark.parametrize("arch", ARCHS)
def test_kernel_cost_keeps_its_bounds(tmp_path, arch):
    found = count(tmp_path, arch, points=())
    assert found["breaches"] == []
    assert all(cost["by_die"] >= cost["needed"] for cost in found["costs"])
    points = {(cost["tokens"], cost["heads"], cost["label"][-5:]) for cost in found["costs"]}
    counted = product((1, 16, 32, 64, 128, 256, 512), (8, 16, 32, 128), ("<2GiB", ">2GiB"))
    assert points == set(counted)


@pytest.mark.mutation
@pytest.mark.parametrize("name", [*PLANTED_TEXT, *PLANTED_FUNCTIONS])
def test_kernel_cost_mutation_breaks_a_bound(tmp_path, name):
    *change, bounds = PLANTED_TEXT.get(name) or ("", "", *PLANTED_FUNCTIONS[name])
    breaches = count(tmp_path, "gfx942", *change)["breaches"]
    assert all(any(bound in breach for breach in breaches) for bound in bounds)
    assert all(any(bound in breach for bound in bounds) for breach in breaches), breaches


def test_kernel_cost_the_locked_triton_has_a_bound_that_one_instruction_breaks():
    """The planted bug below is not skipped there."""
    locked = re.search(r"^triton==(\d+)\.(\d+)", (ROOT / "requirements/cpu.lock").read_text(), re.M)
    assert tuple(map(int, locked.groups())) >= TIGHT


@pytest.mark.skipif(cost.RELEASE < TIGHT, reason="Triton 3.6 makes four instructions of a clamp")
@pytest.mark.mutation
def test_kernel_cost_mutation_that_clamps_twice_breaks_the_bound_of_vector_time(tmp_path):
    breaches = count(tmp_path, "gfx942", *SECOND_CLAMP, points=LARGE_POINTS)["breaches"]
    assert len(breaches) == 4  # each over a cache below 2 GiB and a larger one
    assert all("us of vector instructions" in breach for breach in breaches), breaches
