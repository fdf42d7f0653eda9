"""W_UK in the activation dtype: one batched product, straight into a token-major buffer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_aiter_mla.kernels.absorb.form import AbsorbWeight, Key


def absorb(q_nope: torch.Tensor, w_uk_t: torch.Tensor) -> torch.Tensor:
    """q_nope [T, N, P] x W_UK_T [N, P, L] -> [T, N, L], token-major and contiguous, rounded to the activation dtype.

    Writes the batched product straight into the token-major buffer, as vLLM's ``forward_impl`` does.
    """
    out = q_nope.new_empty((q_nope.size(0), w_uk_t.size(0), w_uk_t.size(2)))
    torch.bmm(q_nope.transpose(0, 1), w_uk_t, out=out.transpose(0, 1))
    return out


@dataclass(frozen=True, slots=True)
class PlainWeight(AbsorbWeight):
    """``w_uk_t`` [N, P, L] in the activation dtype, any strides."""

    form: ClassVar[str] = "plain"
    w_uk_t: torch.Tensor

    @classmethod
    def read(cls, tensors: Mapping[str, torch.Tensor]) -> PlainWeight | None:
        """See the base class."""
        weight = tensors.get("W_UK_T")
        return cls(weight) if weight is not None and weight.dtype.is_floating_point else None

    @classmethod
    def make(cls, w_uk_t: torch.Tensor, key: Key) -> PlainWeight:
        """See the base class."""
        return cls(w_uk_t)

    @property
    def key(self) -> Key:
        """See the base class."""
        return (self.form,)

    @property
    def sizes(self) -> tuple[int, ...]:
        """See the base class."""
        return tuple(self.w_uk_t.shape)

    @property
    def tensors(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """See the base class."""
        return (("w_uk_t", self.w_uk_t),)

    def broken(self, act: torch.dtype) -> str | None:
        """See the base class."""
        dtype = self.w_uk_t.dtype
        return None if dtype == act else f"w_uk_t: dtype {act} (that of q) expected in the plain form, got {dtype}"

    def product(self, q_nope: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        return absorb(q_nope, self.w_uk_t)

    reference = product


def plain(weight: AbsorbWeight) -> torch.Tensor:
    """``w_uk_t`` [N, P, L] of a weight in the plain form, for a kernel that multiplies by itself.

    Raises:
        TypeError: another form.
    """
    if not isinstance(weight, PlainWeight):
        raise TypeError(f"the weight is in the form {weight.form}, not plain")
    return weight.w_uk_t
