"""The protocol of the back ends, and synthetic operands."""

from __future__ import annotations

import pytest
import torch

from vllm_aiter_mla.kernels.backend import Binding, KernelBackend
from vllm_aiter_mla.kernels.inputs import DecodeInputs, KernelInputError, LayerShape, synthetic_inputs
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.kernels.selfcheck import self_check

SMALL = LayerShape(2, 8, torch.bfloat16, torch.bfloat16, 4, False, latent=16, rope=8)


def test_every_answer_follows_from_bind() -> None:
    class Refusing(KernelBackend):
        name = "refusing"

        def bind(self, inputs: DecodeInputs) -> Binding | str:
            return "never"

    operands = synthetic_inputs(SMALL)
    assert Refusing().refuse(operands) == "never"
    assert Refusing().kernel_of(operands) is None
    with pytest.raises(KernelInputError, match="refusing: never"):
        Refusing().prepare(operands)
    assert not self_check(Refusing(), SMALL).ok
    assert self_check(ReferenceBackend(), SMALL).ok


def test_synthetic_operands_on_meta_take_no_memory_whatever_their_number() -> None:
    ghost = synthetic_inputs(LayerShape(2, 8, torch.bfloat16, torch.bfloat16, 4, False, device="meta"), 1 << 32)
    assert ghost.num_tokens == 1 << 32
    assert {tensor.device.type for _, tensor in ghost.tensors} == {"meta"}
