"""The forms in which vLLM holds the absorbed up-projection W_UK. A new form is one file here and its line in FORMS."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_aiter_mla.kernels.absorb.form import AbsorbWeight, Key
from vllm_aiter_mla.kernels.absorb.fp8 import Fp8Weight
from vllm_aiter_mla.kernels.absorb.mxfp4 import Mxfp4Weight
from vllm_aiter_mla.kernels.absorb.plain import PlainWeight

FORMS: tuple[type[AbsorbWeight], ...] = (PlainWeight, Fp8Weight, Mxfp4Weight)


class UnknownWeightError(ValueError):
    """A layer holds its absorbed weight in a form that no file here knows; the message names its tensors."""


def read(tensors: Mapping[str, torch.Tensor]) -> AbsorbWeight:
    """The absorbed weight in a layer's tensors, by vLLM's names for them ("W_UK_T", "W_K", ...).

    Raises:
        UnknownWeightError: no form knows them.
    """
    for form in FORMS:
        weight = form.read(tensors)
        if weight is not None:
            return weight
    given = ", ".join(f"{name} of {tensor.dtype}" for name, tensor in tensors.items()) or "nothing"
    raise UnknownWeightError(f"no known form of the absorbed weight in {given}")


def make(w_uk_t: torch.Tensor, key: Key) -> AbsorbWeight:
    """``w_uk_t`` [N, P, L] in the form that ``key`` describes: synthetic operands for a layer of that form."""
    return next(form for form in FORMS if form.form == key[0]).make(w_uk_t, key)
