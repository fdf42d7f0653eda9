"""The matcher recognises every spelling of an MLA layer, and each chain of passes computes what the graph computed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.passes.execute import assert_rewritten_right, calls, clean, clone, rewrite, stubs_for
from tests.passes.graphs import Builder, Layer, Spelling, build, shuffled
from tests.passes.stubs import DECODE, MIXED, Sizes
from vllm_aiter_mla import status
from vllm_aiter_mla.passes.fx import view_root
from vllm_aiter_mla.passes.match import LayerMatch, match_layers

BF16, FP32 = torch.bfloat16, torch.float32
SPELLINGS: dict[str, dict[str, Any]] = {
    "plain RotaryEmbedding": {"rope": "plain", "lookup": "index_select"},
    "DeepSeek scaling": {"rope": "deepseek"},
    "an embedding lookup": {"rope": "plain", "lookup": "embedding"},
    "the rotary custom op on 3-D operands": {"rope": "op"},
    "the rotary custom op on 2-D operands": {"rope": "op, flat"},
    "FlashInfer's rotary op": {"rope": "flashinfer"},
    "AITER's rotary op": {"rope": "aiter"},
    "q without q_lora": {"q_lora": False},
    "one shared view": {"views": "shared"},
    "the rotated half scattered directly": {"write": "scatter"},
    "the rotated half concatenated": {"write": "cat"},
    "no None arguments": {"none_kwargs": False},
    "a layer that vLLM's own pass has fused": {"prefused": True},
    "one head": {"sizes": Sizes(n=1)},
    "DeepSeek's widths": {"sizes": Sizes(n=4, p=128, r=64, latent=512, v=128)},
}
both_styles = pytest.mark.parametrize("is_neox", [True, False], ids=["NeoX", "GPT-J"])


def assert_bound(match: Any, builder: Builder, layer: Layer, spelling: Spelling) -> None:
    """Every field of the record names what the layer was built from."""
    z = spelling.sizes
    assert isinstance(match, LayerMatch), match
    assert (match.layer_name, match.layer_name_arg) == (layer.name, layer.name_arg)
    assert (match.attention, match.kv_update) == (layer.attention, layer.kv_update)
    assert view_root(match.q) is layer.q_gemm
    assert tuple(match.q.meta["val"].shape[1:]) == (z.n, z.p + z.r)
    assert view_root(match.k_pe) is view_root(layer.k_raw)
    assert match.k_pe.meta["val"].shape[-1] == z.r
    assert (match.kv_c, match.k_scale) == (layer.kv_c, builder.k_scale)
    assert (match.positions, match.cos_sin_cache) == (builder.positions, builder.table)
    assert (match.is_neox, match.kv_cache_dtype) == (spelling.is_neox, spelling.cache)
    assert (match.num_heads, match.nope_dim, match.rope_dim, match.latent_dim) == (z.n, z.p, z.r, z.latent)
    assert match.prefused == spelling.prefused


@both_styles
@pytest.mark.parametrize("changes", SPELLINGS.values(), ids=SPELLINGS)
def test_layer_is_bound_to_what_it_was_built_from_with(changes: dict[str, Any], is_neox: bool) -> None:
    builder = Builder(Spelling(is_neox=is_neox, **changes))
    for _ in range(3):
        builder.layer()
    gm = builder.finish()
    for (_, match), layer in zip(match_layers(gm.graph), builder.layers, strict=True):
        assert_bound(match, builder, layer, builder.spelling)


@both_styles
@pytest.mark.parametrize("changes", SPELLINGS.values(), ids=SPELLINGS)
def test_every_chain_is_bit_exact_in_bf16_with(changes: dict[str, Any], is_neox: bool) -> None:
    gm, layers = build(2, dtype=BF16, is_neox=is_neox, **changes)
    counts = assert_rewritten_right(gm, stubs_for(layers, Spelling(dtype=BF16, **changes)))
    fused = changes.get("prefused", False)
    assert counts == {
        "matched": 2,
        "skipped": 0,
        "rope_kv_cache": 0 if fused else 2,
        "vllm_fused": 2 if fused else 0,
        "q_prep_lift": 2,
        "aiter_fusion": 2,
    }


@both_styles
@pytest.mark.parametrize("rope", ["plain", "deepseek", "op, flat"])
def test_every_chain_is_bit_exact_with_an_fp8_cache_and_query(rope: str, is_neox: bool) -> None:
    gm, layers = build(2, dtype=BF16, rope=rope, is_neox=is_neox, cache="fp8")
    assert_rewritten_right(gm, stubs_for(layers, Spelling(dtype=BF16, cache="fp8")))


def test_fp32_layers_are_bit_exact_but_for_the_fma_of_vllms_neox_kernel() -> None:
    gm, layers = build(2, is_neox=False)
    assert_rewritten_right(gm, stubs_for(layers, Spelling()))
    gm, layers = build(2, is_neox=True)
    assert_rewritten_right(gm, stubs_for(layers, Spelling()), batches=(DECODE,))
    assert_rewritten_right(gm, stubs_for(layers, Spelling()), batches=(MIXED,), exact=False)


@pytest.mark.parametrize("seed", range(4))
def test_graph_need_not_be_sorted(seed: int) -> None:
    gm, layers = build(3, rope=("plain", "deepseek", "op", "op, flat")[seed], dtype=BF16)
    counts = assert_rewritten_right(
        gm, stubs_for(layers, Spelling(dtype=BF16)), batches=(MIXED,), disturb=lambda copy: shuffled(copy, seed)
    )
    assert counts["aiter_fusion"] == 3


def test_string_constants_name_layers_too() -> None:
    gm, layers = build(2, names="string")
    assert [name for name, _ in match_layers(gm.graph)] == [layer.name for layer in layers]


@pytest.mark.slow
def test_chain_is_bit_exact_where_vllm_names_layers_by_string() -> None:
    """The ops take strings only with this variable, which vLLM reads when it is imported: a process of its own."""
    case = f"{Path(__file__)}::test_every_chain_is_bit_exact_in_bf16_with"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", case, "-k", "NeoX and DeepSeek"],
        env={**os.environ, "VLLM_USE_LAYERNAME": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "2 passed" in done.stdout


def test_layers_of_different_spellings_share_a_graph() -> None:
    builder = Builder(Spelling(dtype=BF16))
    for rope in ("plain", "deepseek", "op", "op, flat", "flashinfer"):
        builder.layer(rope=rope, is_neox=rope != "op")
    counts = assert_rewritten_right(builder.finish(), stubs_for(builder.layers, builder.spelling))
    assert counts["aiter_fusion"] == 5


def test_offset_positions_are_bound_as_they_are_read() -> None:
    builder = Builder(Spelling(dtype=BF16))
    builder.positions = builder(torch.ops.aten.add.Tensor, builder.positions, 1)
    layer = builder.layer()
    gm = builder.finish()
    ((_, match),) = match_layers(gm.graph)
    assert isinstance(match, LayerMatch)
    assert match.positions is builder.positions
    assert_rewritten_right(gm, stubs_for([layer], builder.spelling))


def test_nothing_of_passes_one_and_two_is_left_after_three() -> None:
    gm, layers = build(3, spelling=Spelling(dtype=BF16))
    stubs = stubs_for(layers, Spelling(dtype=BF16))
    gone = ("unified_mla_kv_cache_update", "fused_rope_unified_mla_kv_cache_update", "mla_decode_q_prep")
    gone += ("unified_mla_attention_with_output", "mla_attention_with_prepared_q")
    changed = clone(gm)
    rewrite(changed, stubs)
    for name in gone:
        assert not calls(changed, name), name
    cleaned = clean(changed)
    left = [str(node.target) for node in cleaned.graph.nodes if node.op == "call_function"]
    assert left.count("vllm_aiter_mla.mla_attention_with_rope.default") == 3
    assert not [name for name in left if "slice_scatter" in name or "aten.copy" in name or "index" in name]


@pytest.mark.parametrize(
    ("stop", "present"),
    [
        ("rope_kv_cache", {"fused_rope_unified_mla_kv_cache_update", "unified_mla_attention_with_output"}),
        (
            "q_prep_lift",
            {"fused_rope_unified_mla_kv_cache_update", "mla_decode_q_prep", "mla_attention_with_prepared_q"},
        ),
        (None, {"mla_attention_with_rope"}),
    ],
)
def test_chain_stops_where_it_is_told_to(stop: str | None, present: set[str]) -> None:
    gm, layers = build(2)
    rewrite(gm, stubs_for(layers, Spelling()), stop)
    every = {"unified_mla_kv_cache_update", "unified_mla_attention_with_output", "mla_decode_q_prep"}
    every |= {"fused_rope_unified_mla_kv_cache_update", "mla_attention_with_prepared_q"}
    every |= {"mla_attention_with_rope"}
    assert {name for name in every if calls(gm, name)} == present
    assert all(len(calls(gm, name)) == 2 for name in present)
    known = {} if stop is None else {layer.name: ("stop_after", f"debug.stop_after={stop}") for layer in layers}
    assert status.current().partial == known
