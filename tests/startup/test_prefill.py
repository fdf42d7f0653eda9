"""The check of what rotates prefill rows: vLLM's rotary kernel rounds once, or its layers are left to vLLM."""

import logging

import pytest
import torch
from vllm.config import CompilationMode

from tests.sandbox import gpu_ops
from tests.support.opcalls import layer_of
from tests.support.strict import stops
from tests.support.worker import check
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.inputs import LayerShape
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.startup import prefill

SHAPES = [
    LayerShape(heads, 16, cache, cache, 16, False, act=act)
    for heads in (1, 16)
    for act in (torch.bfloat16, torch.float16)
    for cache in (act, torch.float8_e4m3fn)
]


def kernel(change=lambda x: x, **rounding):
    """A rotary kernel that rounds as it is told, and what changes its result."""

    def rotates(positions, q_pe, k_pe, table, is_neox):
        cos, sin = (half.unsqueeze(1) for half in reference.gather_cos_sin(table, positions))
        for x in (q_pe, k_pe):
            x.copy_(change(reference.rotate(x, cos, sin, is_neox, **rounding)))

    return rotates


@pytest.mark.parametrize("shape", SHAPES, ids=LayerShape.in_words)
def test_a_kernel_that_rounds_once_passes(shape):
    prefill.compare_rotation(kernel(), shape)


def of_keys(change):
    return lambda x: change(x) if x.shape[1] == 1 else x


@pytest.mark.mutation("I12")
@pytest.mark.parametrize("shape", SHAPES[4:6], ids=LayerShape.in_words)
@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("q", lambda shape: kernel(dtype=shape.act)),
        ("k", lambda shape: kernel(of_keys(lambda x: x * 1.01))),
        ("q", lambda shape: lambda positions, *rest: kernel()(positions - 1, *rest)),
        ("q", lambda shape: lambda *given: None),
    ],
    ids=["rounds three times", "scales the keys", "reads the row before", "rotates nothing"],
)
def test_mutation_a_rotary_kernel_that_does_otherwise_is_caught(shape, name, planted):
    with pytest.raises(prefill.RotationError, match=rf": {name} \d+ step"):
        prefill.compare_rotation(planted(shape), shape)


@pytest.fixture
def rounds_three_times(monkeypatch):
    monkeypatch.setattr(gpu_ops, "rotate", lambda x, cos, sin, is_neox: reference.rotate(x, cos, sin, is_neox, x.dtype))


@pytest.mark.mutation("I12")
@pytest.mark.usefixtures("rounds_three_times")
@pytest.mark.parametrize("strict", [False, True])
def test_mutation_layers_whose_prefill_rows_would_round_three_times_are_left_to_vllm(said, strict):
    layer = Layer.of(layer_of())
    with stops(strict):
        check([layer], strict=strict)
    skip = layer.decision.skip
    assert skip.code == "kernel_shape"
    assert "vLLM's rotary kernel differs from a rotation that rounds once" in skip.message
    assert strict or any("a rotation that rounds once" in text for text in said.at(logging.ERROR))


@pytest.mark.usefixtures("rounds_three_times")
@pytest.mark.parametrize(("field", "value"), [("mode", CompilationMode.NONE), ("backend", "eager")])
def test_a_layer_that_rotates_by_its_own_module_needs_no_such_kernel(said, field, value):
    module = layer_of()
    setattr(module._vllm_config.compilation_config, field, value)
    assert not compat_layer.rounds_once(module)
    check([Layer.of(module)], strict=True)
    assert Layer.of(module).decision.skip is None
