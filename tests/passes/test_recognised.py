"""The matcher recognises every spelling of an MLA layer, and each chain of passes computes what the graph computed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.passes.execute import assert_rewritten_right, calls, clean, rewrite, skipped_in_graphs, stubs_for
from tests.passes.graphs import Builder, Spelling, build, shuffled
from tests.passes.stubs import DECODE, MIXED, Batch, Sizes
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.compat.layer import FUSED_ROPE, ROTARY_KERNEL
from vllm_aiter_mla.passes import match, pipeline, q_prep_lift, rope_kv
from vllm_aiter_mla.passes.fx import view_root
from vllm_aiter_mla.passes.match import LayerMatch, match_layers
from vllm_aiter_mla.serving import ops

BF16 = torch.bfloat16
SPELLINGS = {
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
    **{f"an fp8 cache and query, {rope}": {"rope": rope, "cache": "fp8"} for rope in ("plain", "deepseek", "op, flat")},
}
both_styles = pytest.mark.parametrize("is_neox", [True, False], ids=["NeoX", "GPT-J"])


def rotation_of(spelling):
    """The op that rotates in a graph of this spelling; vLLM's kernel rounds as code that Inductor generates."""
    if spelling.prefused:
        return FUSED_ROPE
    by_op = {"flashinfer": "vllm::flashinfer_rotary_embedding", "aiter": "vllm::rocm_aiter_triton_rotary_embedding"}
    return next((op for rope, op in by_op.items() if rope in spelling.rope), ROTARY_KERNEL)


def assert_bound(found, builder, layer, spelling):
    """Every field of the record names what the layer was built from."""
    z = spelling.sizes
    assert isinstance(found, LayerMatch), found
    assert (found.layer_name, found.layer_name_arg) == (layer.name, layer.name_arg)
    assert found.attention is layer.attention
    assert view_root(found.q) is layer.q_gemm
    assert tuple(found.q.meta["val"].shape[1:]) == (z.n, z.p + z.r)
    assert view_root(found.k_pe) is view_root(layer.k_raw)
    assert found.k_pe.meta["val"].shape[-1] == z.r
    assert (found.kv_c, found.k_scale) == (layer.kv_c, layer.k_scale)
    assert (found.positions, found.cos_sin_cache) == (builder.positions, builder.table)
    assert (found.is_neox, found.kv_cache_dtype) == (spelling.is_neox, spelling.cache)
    assert (found.num_heads, found.nope_dim, found.rope_dim, found.latent_dim) == (z.n, z.p, z.r, z.latent)
    assert found.rotation == rotation_of(spelling)


@both_styles
@pytest.mark.parametrize("changes", SPELLINGS.values(), ids=SPELLINGS)
def test_layer_is_bound_to_what_it_was_built_from_with(changes, is_neox):
    builder = Builder(Spelling(is_neox=is_neox, **changes))
    for _ in range(3):
        builder.layer()
    gm = builder.finish()
    for (_, found), layer in zip(match_layers(gm.graph), builder.layers, strict=True):
        assert_bound(found, builder, layer, builder.spelling)


@both_styles
@pytest.mark.parametrize("changes", SPELLINGS.values(), ids=SPELLINGS)
def test_every_chain_is_bit_exact_in_bf16_with(changes, is_neox):
    gm, layers = build(2, dtype=BF16, is_neox=is_neox, **changes)
    # Decode rows round as the kernel that prepares them: here as what runs with the flag off.
    rounding = "three" if changes.get("prefused") else "two"
    stubs = stubs_for(layers, Spelling(dtype=BF16, **changes), debug={"rounding": rounding})
    counts = assert_rewritten_right(gm, stubs)
    first, other = ("vllm_fused", "rope_kv_cache")[:: 1 if changes.get("prefused") else -1]
    assert counts == {"matched": 2, "skipped": 0, first: 2, other: 0, "q_prep_lift": 2, "aiter_fusion": 2}


@settings(suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate], max_examples=16)
@given(
    st.builds(
        Sizes,
        n=st.integers(1, 5),
        p=st.integers(1, 12),
        # vLLM's CPU kernel, which rotates prefill rows, works in vectors of 8 and writes past narrower halves.
        r=st.integers(1, 4).map(lambda vectors: 16 * vectors),
        latent=st.integers(1, 40),
        v=st.integers(1, 6),
    ),
    st.sampled_from(["plain", "deepseek", "op", "op, flat"]),
    st.booleans(),
    st.integers(1, 6),
    st.integers(0, 5),
    st.integers(0, 3),
    st.integers(0, 99),
)
def test_any_head_count_width_batch_and_order_of_nodes_is_bit_exact(
    sizes, rope, is_neox, decodes, prefills, padding, seed
):
    batch = Batch("drawn", rows=decodes + prefills + padding, decodes=decodes, prefills=prefills)
    spelling = Spelling(rope=rope, is_neox=is_neox, dtype=torch.bfloat16, sizes=sizes)
    gm, layers = build(1 + seed % 3, spelling)
    counts = assert_rewritten_right(
        gm, stubs_for(layers, spelling), batches=(batch,), disturb=lambda copy: shuffled(copy, seed)
    )
    assert counts["aiter_fusion"] == len(layers)


def test_fp32_layers_are_bit_exact_but_for_the_fma_of_vllms_neox_kernel():
    gm, layers = build(2, is_neox=False)
    assert_rewritten_right(gm, stubs_for(layers, Spelling()))
    gm, layers = build(2, is_neox=True)
    assert_rewritten_right(gm, stubs_for(layers, Spelling()), batches=(DECODE,))
    assert_rewritten_right(gm, stubs_for(layers, Spelling()), batches=(MIXED,), exact=False)


def test_string_constants_name_layers_too():
    gm, layers = build(2, names="string")
    assert [name for name, _ in match_layers(gm.graph)] == [layer.name for layer in layers]


@pytest.mark.slow
@pytest.mark.wide  # `make test-torch TORCH=2.10` runs all of them with strings
def test_chain_is_bit_exact_where_vllm_names_layers_by_string():
    """The ops take strings only with this variable, which vLLM reads when it is imported: a process of its own."""
    case = f"{Path(__file__)}::test_every_chain_is_bit_exact_in_bf16_with"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", case, "-k", "NeoX and DeepSeek"]
    environment = {**os.environ, "VLLM_USE_LAYERNAME": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "3 passed" in done.stdout


def test_layers_of_different_spellings_share_a_graph():
    builder = Builder(Spelling(dtype=BF16))
    for rope in ("plain", "deepseek", "op", "op, flat", "flashinfer"):
        builder.layer(rope=rope, is_neox=rope != "op")
    counts = assert_rewritten_right(builder.finish(), stubs_for(builder.layers, builder.spelling))
    assert counts["aiter_fusion"] == 5


def test_offset_positions_are_bound_as_they_are_read():
    builder = Builder(Spelling(dtype=BF16))
    builder.positions = builder(torch.ops.aten.add.Tensor, builder.positions, 1)
    layer = builder.layer()
    gm = builder.finish()
    ((_, found),) = match_layers(gm.graph)
    assert isinstance(found, LayerMatch)
    assert found.positions is builder.positions
    assert_rewritten_right(gm, stubs_for([layer], builder.spelling))


STOPPED = {
    "rope_kv_cache": {"fused_rope_unified_mla_kv_cache_update", "unified_mla_attention_with_output"},
    "q_prep_lift": {"fused_rope_unified_mla_kv_cache_update", "mla_decode_q_prep", "mla_attention_with_prepared_q"},
    None: {"mla_attention_with_rope"},
}
"""The MLA ops that each chain of passes leaves."""


@pytest.mark.parametrize("stop", STOPPED)
def test_each_pass_leaves_its_own_ops(stop):
    """Before and after vLLM's clean-up."""
    gm, layers = build(2)
    stubs = stubs_for(layers, Spelling())
    rewrite(gm, stubs, stop)
    every = {"unified_mla_kv_cache_update"}.union(*STOPPED.values())
    for graph in (gm, clean(gm)):
        assert {name: len(found) for name in every if (found := calls(graph, name))} == dict.fromkeys(STOPPED[stop], 2)
    assert skipped_in_graphs(stubs) == {}


def test_nothing_of_the_rotation_is_left_after_pass_three():
    gm, layers = build(3, spelling=Spelling(dtype=BF16))
    rewrite(gm, stubs_for(layers, Spelling(dtype=BF16)))
    left = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    assert left.count("vllm_aiter_mla.mla_attention_with_rope.default") == 3
    assert not [name for name in left if "slice_scatter" in name or "aten.copy" in name or "index" in name]


@pytest.mark.mutation
def test_mutation_kv_update_is_left_beside_the_fused_op(monkeypatch):
    """The row would be written twice, and the second time from whatever k_pe holds by then."""

    def still_waits(graph, layer):
        dep = layer.attention.kwargs["kv_cache_dummy_dep"]
        rope_kv.fuse_rope_and_kv_write(graph, layer)
        layer.attention.kwargs = {**layer.attention.kwargs, "kv_cache_dummy_dep": dep}

    monkeypatch.setitem(pipeline.PASSES, "rope_kv_cache", still_waits)
    for stop in ("rope_kv_cache", "q_prep_lift"):
        with pytest.raises(AssertionError, match=r"1 more item:\s+\{'unified_mla_kv_cache_update': 2"):
            test_each_pass_leaves_its_own_ops(stop)


views = {}
heads = rope_kv._heads
find_q, find_k, once = match._Matcher._find_q, match._Matcher._find_k, ops.rotate_and_write


def shares_the_view(graph, layer):
    return views.get(layer.attention) or views.setdefault(layer.attention, heads(graph, layer))


def only_the_query_is_rotated(step, q, k_pe, *rest):
    once(step, q, k_pe.clone(), *rest)
    return k_pe.unsqueeze(1)


def prepares_the_raw_query(graph, layer):
    layer.attention.kwargs = {**layer.attention.kwargs, "q": layer.q}
    q_prep_lift.lift_q_prep(graph, layer)


PLANTED = {
    "pass 1 binds the other pairing to q": (match._Matcher, "_find_q", lambda *args: (False, find_q(*args)[1])),
    "pass 1 shares the view that vLLM erases": (rope_kv, "_heads", shares_the_view),
    "pass 1 rotates without writing back": (rope_kv, "_write_back", lambda graph, layer, *rest: heads(graph, layer)),
    "pass 2 prepares the raw query": (pipeline.PASSES, "q_prep_lift", prepares_the_raw_query),
    "I3 prefill rows are not rotated": (ops, "rotate_and_write", lambda step, q, k_pe, *rest: k_pe.unsqueeze(1)),
    "I3 prefill rows are rotated twice": (ops, "rotate_and_write", lambda *args: (once(*args), once(*args))[1]),
    "I3 only the query is": (ops, "rotate_and_write", only_the_query_is_rotated),
    "I3 the first row decides": (compat_layer, "is_decode_only", lambda metadata, slots: metadata.decode is not None),
}
SEEN = {
    "pass 1 binds the other pairing to q": "output 0 differs .*rope_kv_cache, decode",
    # FixFunctionalizationPass erases the view under the scatter without looking at its other readers.
    "pass 1 shares the view that vLLM erases": "Tried to erase Node",
    "pass 1 rotates without writing back": r"output 0 differs \(cleaned, .*rope_kv_cache, decode",
    "pass 2 prepares the raw query": r"output 0 differs \(cleaned, .*q_prep_lift, decode",
    "I3 the first row decides": "output 0 differs .*q_prep_lift, mixed",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.mutation(*{"I3"} & {name[:2]})) for name in PLANTED]
)
def test_mutation_is_caught_by_execution(name, monkeypatch):
    owner, attribute, plant = PLANTED[name]
    (monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr)(owner, attribute, plant)
    if attribute == "_find_q":
        monkeypatch.setattr(owner, "_find_k", lambda self, *args: find_k(self, *args[:-1], True))
    gm, layers = build(2, dtype=BF16)
    seen = SEEN.get(name, "output 0 differs .*None, mixed")
    with pytest.raises((AssertionError, RuntimeError, KeyError), match=seen):
        assert_rewritten_right(gm, stubs_for(layers, Spelling(dtype=BF16)))
