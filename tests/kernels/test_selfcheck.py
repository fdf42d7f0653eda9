"""What the self-check compares, each kernel of a back end that the decode limit reaches, and what it reports."""

from __future__ import annotations

import pytest
import torch

from tests.sandbox.simulated_aiter import ROCM, install, op
from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.backend import Binding
from vllm_aiter_mla.kernels.inputs import DecodeInputs, LayerShape
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.kernels.selfcheck import self_check

SMALL = LayerShape(2, 8, torch.bfloat16, torch.bfloat16, 4, False, latent=16, rope=8)
BF16 = LayerShape(4, 16, torch.bfloat16, torch.bfloat16, 16, False)
MI300X = Platform("gfx942", ROCM)


class Stepped(ReferenceBackend):
    """The reference under three names: up to 8 rows, up to 40, beyond; ``bad`` returns zeros."""

    def __init__(self, bad: str | None = None) -> None:
        self.bad, self.ran = bad, []

    def tried_counts(self, inputs: DecodeInputs) -> tuple[int, ...]:
        return (41, 8, 40)

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        tokens = inputs.num_tokens
        kernel = "few" if tokens <= 8 else "some" if tokens <= 40 else "many"
        return Binding(self._run, kernel)

    def _run(self, inputs: DecodeInputs) -> torch.Tensor:
        self.ran.append(inputs.num_tokens)
        out = reference.prepare(inputs)
        return out * 0 if self.kernel_of(inputs) == self.bad else out


@pytest.mark.parametrize(("limit", "counts"), [(None, [1, 7, 40, 41]), (20, [1, 7, 20]), (8, [1, 7]), (1, [1, 7])])
def test_each_kernel_up_to_the_limit_is_compared_once(limit, counts) -> None:
    backend = Stepped()
    assert self_check(backend, SMALL, limit).ok
    assert backend.ran == counts, "one row warms up"


@pytest.mark.mutation
@pytest.mark.parametrize("bad", ["few", "some", "many"])
def test_mutation_a_kernel_that_is_wrong_fails_the_check_whichever_it_is(bad) -> None:
    assert not self_check(Stepped(bad), SMALL).ok


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("opt", [False, True])
def test_self_check_passes_on_the_simulated_aiter_and_covers_each_kernel_that_serves(arch, block, opt) -> None:
    with install(arch):
        platform = Platform(arch, ROCM)
        bound = AiterBackend(platform, opt=opt)
        result = self_check(bound, LayerShape(4, 16, platform.fp8, platform.fp8, block, False))
    assert result.ok, result.message
    assert {name: d.steps for name, d in result.differences.items()} == dict.fromkeys(result.differences, 0)
    assert set(result.differences) == {"q nope", "q rope", "kv nope", "kv rope"}
    ran = op.forget()
    assert ran[0][1] == 1  # the warm-up with slot -1 comes first
    assert {kernel for kernel, _ in ran} == ({"opt"} if opt else {"per-head", "opt"})


def test_self_check_accepts_rounding_where_truncation_was_inferred(fake_gfx942, monkeypatch) -> None:
    """If gfx942 rounds after all, the card is better than its source says, and is not rejected for it."""
    monkeypatch.setattr("tests.sandbox.simulated_aiter.op.arch", lambda: "gfx950")  # rounds everywhere
    result = self_check(AiterBackend(MI300X), BF16)
    assert result.ok, result.message


def test_self_check_of_the_truncating_kernel_passes(fake_gfx942) -> None:
    result = self_check(AiterBackend(MI300X), BF16)
    assert result.ok, result.message
    assert ("opt", 256) in op.forget()


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


def test_self_check_of_a_refused_shape_says_so(fake_gfx942) -> None:
    bound = AiterBackend(MI300X)
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
