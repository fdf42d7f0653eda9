"""The reference as a back end: runs anywhere, takes whatever the shared contract allows."""

from __future__ import annotations

from functools import partial

from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend
from vllm_aiter_mla.kernels.inputs import DecodeInputs, contract_violation


class ReferenceBackend(KernelBackend):
    """Plain PyTorch; ``numerics`` says which roundings it follows."""

    name = "reference"
    trusted = True

    def __init__(self, numerics: reference.Numerics = reference.AITER) -> None:
        self._numerics = numerics

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        """See the base class."""
        run = partial(reference.prepare, numerics=self._numerics)
        return contract_violation(inputs) or Binding(run, numerics=self._numerics)
