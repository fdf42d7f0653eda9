"""What the self-check compares: each kernel of a back end that the decode limit reaches, once."""

from __future__ import annotations

import pytest
import torch

from tests.sandbox.simulated_aiter import install, op
from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.backend import Binding
from vllm_aiter_mla.kernels.inputs import DecodeInputs, LayerShape
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.kernels.selfcheck import self_check

SMALL = LayerShape(2, 8, torch.bfloat16, torch.bfloat16, 4, False, latent=16, rope=8)
ROCM = (7, 0)


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


def test_a_kernel_that_the_decode_limit_does_not_reach_is_not_checked() -> None:
    assert self_check(Stepped("many"), SMALL, 40).ok


@pytest.mark.parametrize("view", [1, 2, 5, 7, 8, 300])
def test_both_kernels_of_a_numeric_aiter_view_are_compared_where_both_run(view) -> None:
    """From 1 on: 1 asks for opt alone; above 256 AITER itself ends the per-head kernel."""
    with install("gfx942"):
        bound = AiterBackend(Platform("gfx942", ROCM), view=view)
        result = self_check(bound, LayerShape(4, 16, torch.float8_e4m3fnuz, torch.float8_e4m3fnuz, 16, False))
        kernels = {kernel for kernel, _ in op.forget()}
    assert result.ok, result.message
    assert kernels == ({"opt"} if view == 1 else {"per-head", "opt"})
