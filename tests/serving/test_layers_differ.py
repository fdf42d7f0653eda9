"""From the graph of several layers to their kernels: each kernel is given what belongs to its own layer."""

import pytest
import torch

from tests.passes.execute import clean, execute, rewrite, stubs_for
from tests.passes.graphs import Spelling, build
from tests.passes.stubs import DECODE
from tests.support import first_layer
from vllm_aiter_mla.passes import pipeline
from vllm_aiter_mla.serving.layer import Layer

FP8 = Spelling(dtype=torch.bfloat16, cache="fp8")


@pytest.fixture
def scales_given(monkeypatch):
    """The k_scale and the q_scale that a kernel is given, and those of the layer's module, by layer."""
    given, kernel = {}, Layer.kernel

    def asked(layer, inputs):
        module = layer.module
        given[layer.name] = [
            (name, float(getattr(inputs, name)), float(getattr(module, f"_{name}"))) for name in ("k_scale", "q_scale")
        ]
        return kernel(layer, inputs)

    monkeypatch.setattr(Layer, "kernel", asked)
    return given


def run(layers=3):
    gm, made = build(layers, FP8)
    stubs = stubs_for(made, FP8)
    rewrite(gm, stubs)
    execute(clean(gm), stubs, DECODE)


def assert_own(given):
    """Check that each kernel got the scales of its layer."""
    assert len(given) == 3
    for layer, scales in given.items():
        for name, got, own in scales:
            assert got == own, f"{layer} got the {name} of another layer"


def test_own_scales_reach_the_kernel_of_each_layer(scales_given):
    run()
    assert_own(scales_given)


@pytest.mark.mutation
@pytest.mark.parametrize("scale", ["k_scale", "q_scale"])
def test_mutation_own_scales_that_do_not_reach_the_kernel_are_caught(scales_given, scale, monkeypatch):
    if scale == "k_scale":
        monkeypatch.setitem(pipeline.PASSES, "aiter_fusion", first_layer.pass_three())
    else:
        monkeypatch.setattr(Layer, "q_scale", first_layer.q_scale())
    run()
    with pytest.raises(AssertionError, match=f"layers.1.attn got the {scale} of another layer"):
        assert_own(scales_given)
