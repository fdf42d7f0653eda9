"""The back ends of an engine, and which one runs a call: one order, one answer, and the reasons of those before it."""

from dataclasses import replace

import pytest
import torch

from tests.sandbox.simulated_aiter import op
from tests.support.bare_layer import bare_layer
from tests.support.made_up_clock import Named
from tests.support.simulated_aiter import ROCM, inputs
from vllm_aiter_mla.kernels.inputs import LayerShape, synthetic_inputs
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.serving.backends import AITER_KERNELS, FACTORIES, candidates, contenders
from vllm_aiter_mla.serving.layer import Layer

pytestmark = pytest.mark.usefixtures("fake_gfx942")
MI300X, MI355X = Platform("gfx942", ROCM), Platform("gfx950", ROCM)


class VLLMOwn(ReferenceBackend):
    """The reference in the place of vLLM's own kernels."""

    name = "vllm"


WITH_VLLM = {**FACTORIES, "vllm": lambda platform, settings: VLLMOwn()}
WITHOUT_VLLM = {name: factory for name, factory in FACTORIES.items() if name != "vllm"}


def layer(kernel, factories=None):
    return bare_layer(kernel, MI300X, factories)


@pytest.mark.parametrize(
    ("kernel", "platform", "names", "timed"),
    [
        ("auto", MI300X, ("aiter", "aiter-opt", "triton", "vllm"), ("aiter", "aiter-opt", "triton", "vllm")),
        ("auto", MI355X, ("aiter", "aiter-opt", "triton", "vllm"), ("aiter", "aiter-opt", "triton", "vllm")),
        ("aiter-opt", MI300X, ("aiter-opt", "vllm"), ()),
        ("auto", Platform("gfx90a", ROCM), ("vllm",), None),
        ("auto", Platform("sm90"), ("vllm",), ("triton", "vllm")),
        ("auto", Platform("cpu"), ("reference",), ()),
        ("aiter", MI300X, ("aiter", "vllm"), ()),
        ("triton", MI300X, ("triton", "vllm"), ()),
        ("triton", Platform("sm90"), ("triton", "vllm"), ()),
        ("reference", MI300X, ("reference", "vllm"), ()),
        ("vllm", MI300X, ("vllm",), ()),
        ("vllm", Platform("cpu"), ("reference",), ()),
        ("aiter", Platform("cpu"), ("aiter", "reference"), ()),
    ],
)
def test_candidates_of_an_option_on_a_platform_aiter_first_on_amd_and_only_auto_timed(kernel, platform, names, timed):
    assert candidates(kernel, platform) == names
    assert timed is None or contenders(kernel, platform) == timed


def test_an_unknown_kernel_is_an_error():
    with pytest.raises(ValueError, match="no such kernel: 'cuda'"):
        candidates("cuda", MI300X)


def test_a_call_that_a_kernel_does_not_take_goes_to_vllm_and_keeps_the_reason():
    operands = inputs(heads=2, tokens=300)
    choice = layer("aiter", factories=WITH_VLLM).choose(operands)
    assert choice.name == "vllm"
    ((name, reason),) = choice.passed_over
    assert name == "aiter"
    assert "general kernel" in reason
    assert choice.run(operands).shape == (300, 2, 576)
    assert op.forget() == []


def test_without_any_kernel_the_choice_holds_every_reason():
    choice = layer("aiter", factories=WITHOUT_VLLM).choose(inputs(heads=2, tokens=300))
    assert choice.name is choice.backend is choice.run is None
    (aiter, why), last = choice.passed_over
    assert (aiter, last) == ("aiter", ("vllm", "no vllm kernels are registered"))
    assert "kernel: 2 heads" in why


def test_a_refused_kernel_is_passed_over():
    one = layer("auto", factories=WITH_VLLM)
    one.refuse_kernel("aiter", "self-check failed: 3 steps")
    choice = one.choose(inputs())
    assert (choice.name, choice.passed_over) == ("aiter-opt", (("aiter", "self-check failed: 3 steps"),))


def test_the_reference_refuses_what_the_shared_contract_forbids():
    operands = inputs()
    reason = ReferenceBackend().refuse(replace(operands, slot_mapping=operands.slot_mapping.int()))
    assert reason == "slot_mapping: torch.int64 expected, got torch.int32"


SHAPE = LayerShape(2, 16, torch.bfloat16, torch.bfloat16, 4, False, latent=32, rope=16)
TIMED = contenders("auto", MI300X)
NAMED = {name: (lambda platform, settings, name=name: Named(name)) for name in TIMED}


def runs(one, tokens):
    return one.choose(synthetic_inputs(SHAPE, tokens)).name


def test_a_layer_runs_what_timing_chose_and_beyond_it_what_the_largest_count_runs():
    one = layer("auto", factories=NAMED)
    assert runs(one, 1) == "aiter"
    one.prefer(((1, 2, "triton"), (3, 4, "vllm")))
    assert [runs(one, tokens) for tokens in (1, 2, 3, 4, 5)] == ["triton", "triton", "vllm", "vllm", "vllm"]
    one.refuse_kernel("triton", "planted")
    assert runs(one, 1) == "aiter"
    one.prefer(())
    assert runs(one, 3) == "aiter"


def test_what_does_not_take_a_layer_or_was_refused_is_not_timed(monkeypatch):
    one = layer("auto", factories=NAMED)
    monkeypatch.setattr(Layer, "_meta_inputs", lambda self: synthetic_inputs(SHAPE, 1))
    assert list(one.contenders()) == list(TIMED)
    one.refuse_kernel("aiter", "planted")
    assert list(one.contenders()) == ["aiter-opt", "triton", "vllm"]


@pytest.mark.parametrize(
    ("kernel", "missing", "decided"),
    [
        ("auto", AITER_KERNELS, "triton"),
        ("auto", (*AITER_KERNELS, "triton"), "kernel_unavailable"),
        ("aiter", ("aiter",), "kernel_unavailable"),
        ("auto", ("triton",), "aiter"),
    ],
)
def test_where_one_back_end_cannot_be_built_auto_takes_the_next(kernel, missing, decided):
    one = layer(kernel, factories=NAMED | {name: lambda *_, name=name: f"no {name}" for name in missing})
    one.not_admitted = lambda *_: None
    one._meta_inputs = lambda: synthetic_inputs(replace(SHAPE, device="meta"), 1)
    found = one.decide()
    assert getattr(found, "code", found) == decided
    assert decided != "kernel_unavailable" or all(f"no {name}" in found.message for name in missing)
