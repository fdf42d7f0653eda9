"""What our op sees under vLLM's Model Runner V2, and what it makes of it: the tables of README.md."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from tests.sandbox import engine
from tests.sandbox.spec import EngineSpec
from vllm_aiter_mla.compat import release

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parent / "README.md"
RUNS = {
    # Eight heads: gfx950 has a decode kernel for them, gfx942's takes sixteen and a plan.
    "bf16 on gfx950": {"kv_cache_dtype": "auto", "drafts": 0, "arch": "gfx950", "kernel": "aiter"},
    "fp8 with drafts on gfx942": {"kv_cache_dtype": "fp8", "drafts": 2, "arch": "gfx942", "kernel": "reference"},
    "adaptive verification": {
        "kv_cache_dtype": "fp8", "drafts": 2, "arch": "gfx942", "kernel": "reference", "adaptive": True,
    },
}  # fmt: skip
FIRST = {"adaptive verification": "0.33"}
"""Releases of vLLM that have it, later than the lock's: `make test-release` alone makes such a run. The functions of V2
that the others call are those of 0.32."""


def table(adaptive):
    """One of the page's tables: by kind of batch, rows counted, rows with a slot, who decides."""
    part = PAGE.read_text(encoding="utf-8").split("\n## Adaptive verification\n")[int(adaptive)]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    return {kind: tuple(rest[:3]) for kind, *rest in cells[1:]}


# Two minutes each: engines run V2 over bf16 caches in .ci/run already.
OF_CI = [pytest.param(name, marks=[pytest.mark.wide] * name.startswith("bf16"), id=name) for name in RUNS]


@pytest.fixture(scope="module", params=OF_CI)
def found(request, tmp_path_factory):
    asked, first = RUNS[request.param], FIRST.get(request.param, "0.32")
    if Version(release.vllm_version()) < Version(first):
        pytest.skip(f"vLLM {first} or newer expected")
    folder = tmp_path_factory.mktemp("runner-v2")
    # The runs share a cache root: vLLM's notes on the model class cost ten seconds.
    cache = tmp_path_factory.getbasetemp() / "runner-v2-cache"
    environment = engine.environment_for(EngineSpec(), cache, folder / "inductor")
    child = [sys.executable, "-m", "tests.sandbox.runner_v2", str(folder / "model"), json.dumps(asked)]
    run = subprocess.run(child, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return asked, json.loads(run.stdout.splitlines()[-1])


def test_every_kind_of_batch_is_in_the_page_and_decided_as_the_page_says(found):
    asked, answer = found
    page = {kind: told for kind, told in table("adaptive" in asked).items() if asked["drafts"] or "drafts" not in kind}
    assert {k: (v["counted"], v["written"], v["decided"]) for k, v in answer["kinds"].items()} == page


def test_real_rows_and_the_kv_cache_are_vllms_in_every_kind_of_batch(found):
    kinds = found[1]["kinds"]
    assert [kind for kind, told in kinds.items() if not (told["output"] and told["cache"])] == []
    # Rows with a slot are written, and only those.
    assert all((told["changed"] > 0) == (told["written"] not in ("none", "no slots")) for told in kinds.values())


def test_the_sandboxs_page_indices_are_what_vllms_triton_kernel_writes(found):
    assert found[1]["page_indices"]


@pytest.mark.mutation("I3")
def test_mutation_a_mixed_batch_that_counts_as_decode_is_seen(found):
    assert found[1]["planted"]["decided"] == "the op"
    assert not found[1]["planted"]["output"]
