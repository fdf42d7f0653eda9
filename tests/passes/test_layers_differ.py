"""Layers of one graph that differ as those of a checkpoint, a draft or a config do: each is rewritten as itself."""

import pytest
import torch
from vllm.forward_context import get_forward_context

from tests.passes.execute import assert_rewritten_right, stubs_for
from tests.passes.graphs import TABLE_ROWS, Builder, Spelling
from tests.passes.stubs import BLOCK_SIZE, BLOCKS, DECODE, MIXED, Sizes, StubLayer
from tests.passes.traced import model, trace
from tests.support import first_layer
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.passes import pipeline
from vllm_aiter_mla.serving.layer import Layer

BF16 = torch.bfloat16


def built():
    builder = Builder(Spelling(dtype=BF16, cache="fp8"))
    layers = [builder.layer() for _ in range(3)]
    return builder.finish(), stubs_for(layers, builder.spelling)


def traced():
    """From vLLM's own wrapper."""
    module, names = model("deepseek", False, layers=3, q_lora=True, dtype=BF16, cache="fp8")
    return trace(module, BF16), [StubLayer(name, Sizes(), BF16, "fp8") for name in names]


@pytest.fixture(scope="module", params=[built, traced])
def scaled(request):
    """Three layers with an fp8 cache, each with scales of its own."""
    return request.param()


def assert_each_layer_is_right(gm, stubs):
    assert assert_rewritten_right(gm, stubs, batches=(DECODE, MIXED), stops=(None,))["aiter_fusion"] == len(stubs)


def test_own_scales_are_those_of_the_layers_cache_and_query(scaled):
    _, stubs = scaled
    for name in ("_k_scale", "_q_scale"):
        assert len({float(getattr(stub, name)) for stub in stubs}) == len(stubs)
    assert_each_layer_is_right(*scaled)


@pytest.mark.mutation
@pytest.mark.parametrize("scale", ["k_scale", "q_scale"])
def test_mutation_own_scales_that_are_those_of_the_first_layer_are_caught(scaled, scale, monkeypatch):
    ran = []
    if scale == "k_scale":
        monkeypatch.setitem(pipeline.PASSES, "aiter_fusion", first_layer.pass_three(ran=lambda: ran.append(scale)))
    else:
        monkeypatch.setattr(Layer, "q_scale", first_layer.q_scale(lambda: ran.append(scale)))
    with pytest.raises(AssertionError, match=r"output 0 differs .*None, decode"):
        assert_each_layer_is_right(*scaled)
    assert ran


def unlike():
    """Layers of a graph that have other caches, blocks, heads, widths, tables and pairings, and another RoPE."""
    builder, kinds = Builder(Spelling(dtype=BF16, cache="fp8")), []

    def layer(**changes):
        builder.layer(**changes)
        kinds.append(builder.spelling.but(**changes))

    layer()
    layer(cache="auto")  # kv_cache_dtype_skip_layers
    builder.table = builder.input("table_of_a_draft", TABLE_ROWS, builder.spelling.sizes.r)
    layer(is_neox=False, q_lora=False, sizes=Sizes(n=3))
    layer(cache="auto", rope="op", sizes=Sizes(n=1, p=4, latent=48, v=8))
    names = [layer.name for layer in builder.layers]
    stubs = [StubLayer(name, kind.sizes, BF16, kind.cache) for name, kind in zip(names, kinds, strict=True)]
    stubs[2].initial = stubs[2].initial.view(2 * BLOCKS, BLOCK_SIZE // 2, -1)
    return builder.finish(), stubs


def test_layers_with_other_caches_blocks_heads_widths_tables_and_pairings_share_a_graph():
    assert_each_layer_is_right(*unlike())


def slots_of_the_first_layer(ran):
    """What the ops find in a step, with the slots of the layer that asks first."""
    inner, of_step = compat_layer.layer_call, {}

    def layer_call(name):
        *found, slots = inner(name)
        first = of_step.setdefault(id(get_forward_context()), slots)
        if first is not slots:
            ran()
        return *found, first

    return layer_call


@pytest.mark.mutation
@pytest.mark.parametrize("what", ["cos_sin_cache", "is_neox", "slots"])
def test_mutation_what_belongs_only_to_the_first_layer_is_caught(what, monkeypatch):
    ran = []
    if what == "slots":
        monkeypatch.setattr(compat_layer, "layer_call", slots_of_the_first_layer(lambda: ran.append(what)))
    else:
        plant = first_layer.pass_three(what, lambda: ran.append(what))
        monkeypatch.setitem(pipeline.PASSES, "aiter_fusion", plant)
    with pytest.raises(AssertionError, match=r"output 0 differs .*None, decode"):
        assert_each_layer_is_right(*unlike())
    assert ran
