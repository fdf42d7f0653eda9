"""What a launch costs, counted in the executed code: the bounds, and that bugs in the kernel's order are noticed."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.slow
ARCHS = ("gfx942", "gfx950")
# Each plants text in the kernel's source and names the bound that has to break.
PLANTED = {
    "late scale": ("acc *= weight_scale", "acc *= tl.load(w_scale_ptr)", "query tile program"),
    "late rows": ("    x = tl.load(src, mask=loaded[:, None], other=0.0)\n    slot = ",
     "    slot = tl.load(slot_ptr + rows, mask=loaded, other=-1)\n"
     "    x = tl.load(src, mask=(slot >= 0)[:, None], other=0.0)\n    slot = ", "KV latent program"),
    "heads last": ("        rest = pid // N\n        head = pid - rest * N\n",
     "        rest = pid % (token_blocks * latent_tiles)\n        head = pid // (token_blocks * latent_tiles)\n",
     "bytes"),
}  # fmt: skip
RUN = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from tools import aot
from tools.gfx9 import cost
from tools.gfx9.cases import Compiled
from vllm_aiter_mla.kernels.triton import kernel

arch, old, new = sys.argv[1:]
if old:
    source = Path(kernel.__file__).read_text()
    assert source.count(old) == 1, old
    path = Path(sys.argv[0]).with_name("kernel_planted.py")
    path.write_text(source.replace(old, new))
    sys.path.insert(0, str(path.parent))
    import kernel_planted
    kernel.decode_prep_kernel = kernel_planted.decode_prep_kernel
points = [(v, t) for v, t in cost.points(arch) if not old or (t, v.heads, v.weight) == (64, 16, "fp8")]
costs = [cost.cost(Compiled(aot.TARGETS[arch], variant), tokens) for variant, tokens in points]
print(json.dumps({"breaches": cost.breaches(arch, costs), "costs": [asdict(one) for one in costs]}))
"""


def count(folder, arch, old="", new=""):
    """Count in a process of its own, which compiles for one card."""
    script = folder / "count.py"
    script.write_text(RUN)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), arch, old, new]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("arch", ARCHS)
def test_kernel_cost_keeps_its_bounds(tmp_path, arch):
    found = count(tmp_path, arch)
    assert found["breaches"] == []
    assert all(cost["by_die"] >= cost["needed"] for cost in found["costs"])


@pytest.mark.mutation
@pytest.mark.parametrize("name", PLANTED)
def test_kernel_cost_mutation_breaks_a_bound(tmp_path, name):
    old, new, bound = PLANTED[name]
    breaches = count(tmp_path, "gfx942", old, new)["breaches"]
    assert len(breaches) == 1
    assert bound in breaches[0]
