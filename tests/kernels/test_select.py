"""The choice of a kernel: one key, one answer, and the reasons of those passed over."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.sandbox.simulated_aiter import op
from tests.support.made_up_clock import ORDER, Named
from tests.support.simulated_aiter import ROCM, inputs, same_bytes, twin
from vllm_aiter_mla.kernels import reference, select
from vllm_aiter_mla.kernels.inputs import LayerShape, call_key, synthetic_inputs
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.kernels.select import Selector, candidates

pytestmark = pytest.mark.usefixtures("fake_gfx942")
MI300X, MI355X = Platform("gfx942", ROCM), Platform("gfx950", ROCM)


class VLLMOwn(ReferenceBackend):
    """The reference as vLLM's own kernels, which ``layers`` hands in."""

    name = "vllm"


WITH_VLLM = {**select.FACTORIES, "vllm": lambda platform: VLLMOwn()}


@pytest.mark.parametrize(
    ("kernel", "platform", "names"),
    [
        ("auto", MI300X, ("aiter", "vllm")),
        ("auto", MI355X, ("aiter", "vllm")),
        ("auto", Platform("gfx90a", ROCM), ("vllm",)),
        ("auto", Platform("sm90"), ("vllm",)),
        ("auto", Platform("cpu"), ("reference",)),
        ("aiter", MI300X, ("aiter", "vllm")),
        ("triton", Platform("sm90"), ("triton", "vllm")),
        ("reference", MI300X, ("reference", "vllm")),
        ("vllm", MI300X, ("vllm",)),
        ("vllm", Platform("cpu"), ("reference",)),
        ("aiter", Platform("cpu"), ("aiter", "reference")),
    ],
)
def test_candidates_of_an_option_on_a_platform_aiter_first_on_amd(kernel, platform, names) -> None:
    assert candidates(kernel, platform) == names


def test_an_unknown_kernel_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such kernel: 'cuda'"):
        Selector("cuda", MI300X)


def test_auto_on_mi300x_runs_aiter() -> None:
    chosen = Selector("auto", MI300X)
    operands = inputs()
    assert chosen.choose(operands).backend.name == "aiter"
    expected = reference.prepare(twin(operands))
    assert same_bytes(chosen.choose(operands).run(operands), expected)
    assert len(op.forget()) == 1


def test_a_refused_call_falls_back_to_vllm_and_keeps_the_reason() -> None:
    chosen = Selector("aiter", MI300X, WITH_VLLM)
    operands = inputs(heads=2, tokens=300)
    choice = chosen.choose(operands)
    assert choice.backend.name == "vllm"
    ((name, reason),) = choice.skips
    assert name == "aiter"
    assert "general kernel" in reason
    assert choice.run(operands).shape == (300, 2, 576)
    assert op.forget() == []


def test_without_any_kernel_the_choice_holds_every_reason() -> None:
    choice = Selector("aiter", MI300X).choose(inputs(heads=2, tokens=300))
    assert choice.backend is choice.run is None
    (aiter, why), last = choice.skips
    assert (aiter, last) == ("aiter", ("vllm", "no vllm kernels are registered"))
    assert "kernel: 2 heads" in why


def test_a_rejected_layer_shape_goes_to_vllm_and_others_stay() -> None:
    chosen = Selector("auto", MI300X, WITH_VLLM)
    bad, good = inputs(), inputs(heads=16)
    assert chosen.choose(bad).backend.name == "aiter"
    chosen.reject("aiter", bad, "self-check failed: 3 steps")
    assert chosen.choose(bad).backend.name == "vllm"
    assert chosen.choose(inputs(tokens=64)).skips == (("aiter", "self-check failed: 3 steps"),)
    assert chosen.choose(good).backend.name == "aiter"


def test_the_reference_refuses_what_the_shared_contract_forbids() -> None:
    operands = inputs()
    reason = ReferenceBackend().refuse(replace(operands, slot_mapping=operands.slot_mapping.int()))
    assert reason == "slot_mapping: torch.int64 expected, got torch.int32"


SHAPE = LayerShape(2, 16, torch.bfloat16, torch.bfloat16, 4, False, latent=32, rope=16)


def measured(kernel: str = "auto", arch: str = "gfx942") -> Selector:
    factories = {name: (lambda platform, name=name: Named(name)) for name in ORDER}
    return Selector(kernel, Platform(arch), factories)


def runs(of: Selector, tokens: int) -> str:
    backend = of.choose(synthetic_inputs(SHAPE, tokens)).backend
    assert backend is not None
    return backend.name


def test_a_selector_runs_what_was_measured_and_the_static_order_elsewhere() -> None:
    one = measured()
    assert runs(one, 1) == "aiter"
    one.prefer(synthetic_inputs(SHAPE, 1), ((1, 2, "triton"), (3, 4, "vllm")))
    assert [runs(one, tokens) for tokens in (1, 2, 3, 4, 5)] == ["triton", "triton", "vllm", "vllm", "aiter"]
    one.reject("triton", synthetic_inputs(SHAPE, 1), "planted")
    assert runs(one, 1) == "aiter"
    one.prefer(synthetic_inputs(SHAPE, 1), ())
    assert runs(one, 3) == "aiter"


@pytest.mark.parametrize(
    ("kernel", "arch", "names"),
    [
        ("auto", "gfx942", ORDER),
        ("auto", "gfx950", ORDER),
        ("auto", "sm90", ("triton", "vllm")),
        ("auto", "cpu", ()),
        *[(kernel, "gfx942", ()) for kernel in ("aiter", "triton", "vllm", "reference")],
    ],
)
def test_only_auto_on_a_card_is_measured(kernel: str, arch: str, names: tuple[str, ...]) -> None:
    assert select.contenders(kernel, Platform(arch)) == names


def test_what_declines_a_layer_or_was_rejected_is_not_timed() -> None:
    one = measured()
    assert list(one.takers(synthetic_inputs(SHAPE, 1))) == list(ORDER)
    one.reject("aiter", synthetic_inputs(SHAPE, 1), "planted")
    assert list(one.takers(synthetic_inputs(SHAPE, 1))) == ["triton", "vllm"]


def test_a_back_end_is_asked_once_per_key_and_the_key_is_computed_once_per_call(monkeypatch) -> None:
    asked, keys = [], []

    class Counting(ReferenceBackend):
        def bind(self, inputs):
            asked.append(1)
            return super().bind(inputs)

    monkeypatch.setattr(select, "call_key", lambda inputs: keys.append(1) or call_key(inputs))
    chosen = Selector("reference", Platform("cpu"), {"reference": lambda platform: Counting()})
    for _ in range(3):
        chosen.choose(synthetic_inputs(SHAPE))
    chosen.choose(synthetic_inputs(SHAPE, tokens=5))
    assert (len(asked), len(keys)) == (2, 4)
