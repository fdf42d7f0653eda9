"""Graphs that Inductor makes of vLLM's own MLA wrapper and rotary modules."""

import pytest
import torch

from tests.passes.execute import assert_rewritten_right
from tests.passes.stubs import DECODE, MIXED, Sizes, StubLayer
from tests.passes.traced import model, trace

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "is_neox", "q_lora"),
    [
        ("plain", True, True),
        ("plain", False, False),
        ("deepseek", False, True),
        ("deepseek", True, False),
        ("plain, op", False, True),
        ("deepseek, op", True, False),
    ],
)
def test_traced_layers_are_all_rewritten_and_right(kind, is_neox, q_lora):
    module, names = model(kind, is_neox, layers=2, q_lora=q_lora, dtype=BF16)
    gm = trace(module, BF16)
    stubs = [StubLayer(name, Sizes(), BF16) for name in names]
    counts = assert_rewritten_right(gm, stubs, batches=(DECODE, MIXED))
    assert (counts["matched"], counts["skipped"], counts["aiter_fusion"]) == (2, 0, 2)
