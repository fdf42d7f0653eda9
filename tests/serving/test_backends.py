"""The back ends of an engine, and which one runs a call: one order, one answer, and the reasons of those before it."""

from dataclasses import replace

import pytest
import torch

from tests.sandbox.simulated_aiter import op
from tests.support.bare_layer import bare_layer
from tests.support.made_up_clock import Named
from tests.support.simulated_aiter import ROCM, inputs
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.kernels import triton
from vllm_aiter_mla.kernels.aiter.op import AiterUnavailableError
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import LayerShape, synthetic_inputs
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.serving import backends
from vllm_aiter_mla.serving.backends import AITER_KERNELS, FACTORIES, candidates
from vllm_aiter_mla.serving.decision import LayerFacts, Offer
from vllm_aiter_mla.settings import Settings

pytestmark = pytest.mark.usefixtures("fake_gfx942")
MI300X, MI355X = Platform("gfx942", ROCM), Platform("gfx950", ROCM)


SHAPE = LayerShape(2, 16, torch.bfloat16, torch.bfloat16, 4, False, latent=32, rope=16)
WITH_VLLM = {**FACTORIES, "vllm": lambda platform, settings: Named("vllm")}


def layer(kernel, factories=None):
    return bare_layer(kernel, MI300X, factories)


@pytest.mark.parametrize(
    ("options", "platform", "names"),
    [
        ({}, MI300X, ("aiter", "aiter-opt", "triton", "vllm")),
        ({"measure": False}, MI355X, ("aiter", "aiter-opt", "triton", "vllm")),
        ({}, Platform("sm90"), ("aiter", "aiter-opt", "triton", "vllm")),
        ({}, Platform("cpu"), ("reference",)),
        ({"kernel": "aiter-opt"}, MI300X, ("aiter-opt",)),
        ({"kernel": "triton"}, Platform("sm90"), ("triton",)),
        ({"kernel": "reference"}, MI300X, ("reference",)),
        ({"kernel": "vllm"}, MI300X, ("vllm",)),
        ({"kernel": "vllm"}, Platform("cpu"), ("reference",)),
        ({"kernel": "aiter"}, Platform("cpu"), ("aiter",)),
    ],
)
def test_candidates_of_the_options_on_a_platform_aiter_first_on_amd_and_a_named_kernel_by_itself(
    options, platform, names
):
    assert candidates(Settings(**options), platform) == names


def test_what_a_kernel_declines_is_asked_for_at_each_count_where_its_answer_may_change():
    """AITER has no fast kernel for two heads from 256 tokens on."""
    shape = replace(SHAPE, heads=2, latent=512, rope=64, nope_dim=128)
    points, offers = layer("auto").backends.offers(shape, 1024)
    assert (points[-1], 255 in points) == (1024, True)
    assert [point for point in points if point not in offers["aiter"].declines] == [p for p in points if p < 256]
    assert "general kernel" in offers["aiter"].declines[1024]
    assert offers["triton"].absent


def test_a_call_that_the_kernel_does_not_take_goes_to_vllm_without_a_launch(said):
    one = layer("aiter", factories=WITH_VLLM)
    one.facts = lambda: LayerFacts(None, {"aiter": Offer()}, (1024,))
    assert one.kernel(inputs(heads=2, tokens=300)) is None
    assert "general kernel" in said[-1][1]
    assert op.forget() == []


def test_the_reference_refuses_what_the_shared_contract_forbids():
    operands = inputs()
    reason = ReferenceBackend().refuse(replace(operands, slot_mapping=operands.slot_mapping.int()))
    assert reason == "slot_mapping: torch.int64 expected, got torch.int32"


def named(missing=()):
    names = ("aiter", "aiter-opt", "triton", "vllm")
    kernels = {name: (lambda platform, settings, name=name: Named(name)) for name in names}
    return kernels | {name: lambda *_, name=name: f"no {name}" for name in missing}


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
    one = layer(kernel, factories=named(missing))
    del one.facts  # those of the class
    one.not_admitted = lambda *_: None
    one.shape = lambda: SHAPE
    found = one.decision
    assert (found.skip.code if found.skip else found.our_first_kernel) == decided
    assert not found.skip or all(f"no {name}" in found.skip.message for name in missing)


def test_each_factory_builds_the_back_end_of_its_name_or_says_why_not(monkeypatch):
    for name in AITER_KERNELS:
        assert FACTORIES[name](MI300X, Settings()).name == name
        assert "this card is sm90" in FACTORIES[name](Platform("sm90"), Settings())

    def unavailable(*_, **__):
        raise AiterUnavailableError("planted")

    monkeypatch.setattr(backends, "AiterBackend", unavailable)
    assert [FACTORIES[name](MI300X, Settings()) for name in AITER_KERNELS] == ["planted"] * 2


@pytest.mark.parametrize(("platform", "width"), [(MI300X, 48), (MI355X, 32)], ids=["whole", "in two parts"])
def test_vllms_back_end_returns_the_query_that_the_cards_decode_kernel_takes(monkeypatch, platform, width):
    monkeypatch.setattr(compat_layer, "has_rope_and_write", lambda: True)
    monkeypatch.setattr(compat_layer, "rope_and_write", lambda *operands: None)
    operands = synthetic_inputs(replace(SHAPE, heads=2), 3)
    assert FACTORIES["vllm"](platform, Settings()).bind(operands).run(operands).shape == (3, 2, width)

    monkeypatch.setattr(compat_layer, "has_rope_and_write", lambda: False)
    assert "concat_and_cache_mla_rope_fused" in FACTORIES["vllm"](platform, Settings())


def test_triton_without_a_card_is_its_interpreter_or_nothing(monkeypatch):
    monkeypatch.setattr(card(), "is_there", lambda: False)
    monkeypatch.setattr(triton, "interpreted", lambda: True)
    assert FACTORIES["triton"](Platform("cpu"), Settings()).name == "triton"
    monkeypatch.setattr(triton, "interpreted", lambda: False)
    assert FACTORIES["triton"](Platform("cpu"), Settings()) == "Triton needs a GPU"
