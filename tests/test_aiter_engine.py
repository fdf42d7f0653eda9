"""The real vLLM engine over the fake AITER, platform checks faked: its tokens are the reference's, to the bit."""

from __future__ import annotations

import pytest

from vllm_aiter_mla.sandbox import engine
from vllm_aiter_mla.sandbox.spec import EngineResult, EngineSpec

pytestmark = pytest.mark.engine
SCENARIOS = ("mixed", "short")


def run(kernel: str, arch: str, kv: str, spawn: bool) -> EngineResult:
    return engine.run(
        EngineSpec(
            kernel=kernel,
            rounding="single",
            fake_arch=arch,
            kv_cache_dtype=kv,
            spawn=spawn,
            scenarios=SCENARIOS,
            model={"num_hidden_layers": 2},
        )
    )


@pytest.mark.parametrize(("arch", "kv", "spawn"), [("gfx942", "fp8", False), ("gfx950", "auto", True)])
def test_the_engine_over_the_fake_aiter_equals_the_reference(arch: str, kv: str, spawn: bool) -> None:
    """Tokens and top-5 log-probabilities of every step are the same; both layers ran the kernel they claim."""
    ours, reference = run("aiter", arch, kv, spawn), run("reference", arch, kv, spawn)
    assert [set(record["engaged"].values()) for record in ours.census] == [{"aiter"}]
    assert [set(record["engaged"].values()) for record in reference.census] == [{"reference"}]
    assert [len(record["engaged"]) for record in ours.census] == [2]
    assert all(ours.scenarios[name] for name in SCENARIOS)
    assert ours.scenarios == reference.scenarios
