"""vLLM's own AITER attention class in the engine, over every head count, cache and card, with and without drafts.

Pytest does not collect this file by itself, because it takes more than half an hour:
``python -m pytest tests/engine/aiter_class_matrix.py``, or a part of it with ``-k "gfx950 and fp8"``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tests.engine.engine_specs import SCALES
from tests.engine.test_engine_parity import assert_all_engaged, assert_parity
from tests.sandbox import engine
from tests.sandbox.runs import BF16_SCENARIOS, CHUNK_TOKENS
from tests.sandbox.spec import EngineSpec


@pytest.mark.parametrize(
    ("arch", "cache", "heads", "drafts"),
    product(("gfx942", "gfx950"), ("auto", "fp8"), (16, 8, 128), (0, 2)),
)
def test_tokens_are_those_of_vllm_in_all_scenarios(arch, cache, heads, drafts, tmp_path_factory):
    ours = EngineSpec(
        scenarios=BF16_SCENARIOS,
        max_num_batched_tokens=CHUNK_TOKENS,
        model={"num_hidden_layers": 1, "num_attention_heads": heads},
        kv_cache_dtype=cache,
        scales=SCALES if cache == "fp8" else None,
        drafts=drafts,
        # Over fp8 AITER rounds otherwise than unmodified vLLM: the reference can round as unmodified vLLM does.
        kernel="reference" if cache == "fp8" else "aiter",
        fake_arch=arch,
        attention="aiter",
    )
    shared = tmp_path_factory.getbasetemp() / "inductor"
    vllm_own, found = (
        engine.run(spec, inductor=shared) for spec in (replace(ours, enabled=False, kernel="auto"), ours)
    )
    assert_all_engaged(found)
    assert_parity(vllm_own, found)
