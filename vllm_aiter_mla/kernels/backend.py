"""The shape every kernel back end has, and the choice among them."""

from __future__ import annotations

from typing import Protocol

import torch

from vllm_aiter_mla.kernels.inputs import DecodeInputs


class KernelBackend(Protocol):
    """One way to run the decode-side preparation.

    A back end says beforehand whether it can take a call (``refuse``), from metadata alone, and then takes it
    (``prepare``). Both must look at the same facts: what ``refuse`` lets through, ``prepare`` runs.
    """

    name: str

    def refuse(self, inputs: DecodeInputs) -> str | None:
        """Why this call cannot be taken, or None. Metadata only: no device synchronisation."""
        ...

    def prepare(self, inputs: DecodeInputs) -> torch.Tensor:
        """Return q_prepared [T, N, L+R] of ``inputs.out_dtype`` and write the KV rows whose slot is >= 0."""
        ...
