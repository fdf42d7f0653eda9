"""The choice of a kernel: one key, one answer, and the reasons of those passed over."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.sandbox.simulated_aiter import install, op
from tests.support.simulated_aiter import ROCM, inputs, same_bytes, twin
from vllm_aiter_mla.kernels import reference, select
from vllm_aiter_mla.kernels.inputs import LayerShape
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.kernels.select import Selector, candidates
from vllm_aiter_mla.kernels.selfcheck import self_check

pytestmark = pytest.mark.usefixtures("fake_gfx942")
MI300X, MI355X = Platform("gfx942", ROCM), Platform("gfx950", ROCM)


class VLLMOwn(ReferenceBackend):
    """Stands for vLLM's own kernels, which the runtime brings along."""

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


def test_the_choice_is_made_once_per_key(monkeypatch) -> None:
    chosen = Selector("aiter", MI300X)
    made = []
    original = chosen._choose
    monkeypatch.setattr(chosen, "_choose", lambda operands: made.append(1) or original(operands))
    for _ in range(3):
        chosen.choose(inputs())
    chosen.choose(inputs(tokens=8))
    assert len(made) == 2


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


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("block", [1, 16])
def test_self_check_passes_on_the_simulated_aiter_and_covers_both_kernels(arch, block) -> None:
    with install(arch):
        platform = Platform(arch, ROCM)
        bound = select.aiter_factory(platform)
        result = self_check(bound, LayerShape(4, 16, platform.fp8, platform.fp8, block, False))
    assert result.ok, result.message
    assert {name: d.steps for name, d in result.differences.items()} == dict.fromkeys(result.differences, 0)
    assert set(result.differences) == {"q nope", "q rope", "kv nope", "kv rope"}
    ran = op.forget()
    assert ran[0][1] == 1  # the warm-up with slot -1 comes first
    assert {kernel for kernel, _ in ran} == ({"per-head", "opt"} if block == 1 else {"opt"})


def test_self_check_accepts_rounding_where_truncation_was_inferred(monkeypatch) -> None:
    """Should gfx942 round after all, the card is better than we read it, and is not rejected for it."""
    monkeypatch.setattr("tests.sandbox.simulated_aiter.op.arch", lambda: "gfx950")  # rounds everywhere
    bound = select.aiter_factory(MI300X)
    bound.view = "as-is"
    result = self_check(bound, LayerShape(4, 16, torch.bfloat16, torch.bfloat16, 16, False))
    assert result.ok, result.message


def test_self_check_of_the_truncating_kernel_survives_the_warm_up_without_a_slot() -> None:
    result = self_check(
        select.aiter_factory(MI300X, "opt"), LayerShape(4, 16, torch.bfloat16, torch.bfloat16, 16, False)
    )
    assert result.ok, result.message
    assert {kernel for kernel, _ in op.forget()} == {"opt"}


def test_self_check_reports_figures_and_stray_bytes_of_a_wrong_kernel() -> None:
    class Off(ReferenceBackend):
        name = "off"

        def prepare(self, operands):
            out = super().prepare(operands)
            operands.kv_cache.view(torch.uint8)[-1, -1, :5] ^= 1
            return out * 2

    result = self_check(Off(), LayerShape(4, 16, torch.bfloat16, torch.bfloat16, 16, False))
    assert not result.ok
    assert result.stray_bytes == 5
    assert result.message.startswith("off: self-check FAILED: q nope 128 step(s)")


def test_self_check_of_a_refused_shape_says_so() -> None:
    bound = select.aiter_factory(MI300X)
    result = self_check(bound, LayerShape(4, 16, torch.uint8, torch.bfloat16, 16, False))
    assert not result.ok
    assert "refused the self-check: kv_cache: view uint8" in result.message


def test_self_check_of_a_wrong_dtype_says_so() -> None:
    class Wide(ReferenceBackend):
        name = "wide"

        def prepare(self, operands):
            return super().prepare(operands).float()

    result = self_check(Wide(), LayerShape(4, 16, torch.bfloat16, torch.bfloat16, 16, False))
    assert "wide: returned [7, 4, 576] torch.float32, expected" in result.message
