"""What every form of the absorbed weight W_UK answers; one file beside this one per form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from vllm_aiter_mla.kernels.platform import Platform

Key = tuple[Any, ...]


class AbsorbWeight(ABC):
    """W_UK of one layer, in one of the forms in which vLLM holds it. N heads, P nope width, L latent width.

    Attributes:
        form: name of the form.
        avoid: what a user can set so that vLLM holds the weight in another form; empty where there is nothing.
        product_bound: largest ||product - reference|| / ||reference|| that counts as right; 0 where the product is the
            reference's own.
    """

    form: ClassVar[str]
    avoid: ClassVar[str] = ""
    product_bound: ClassVar[float] = 0.0

    @classmethod
    @abstractmethod
    def read(cls, tensors: Mapping[str, torch.Tensor]) -> AbsorbWeight | None:
        """The weight in a layer's tensors, by vLLM's names for them, or None where they are not of this form."""

    @classmethod
    @abstractmethod
    def make(cls, w_uk_t: torch.Tensor, key: Key) -> AbsorbWeight:
        """``w_uk_t`` [N, P, L], of the activation dtype, in the form that ``key`` describes: for synthetic operands."""

    @property
    @abstractmethod
    def key(self) -> Key:
        """(form, dtypes ...): what a choice of kernel must know of the weight."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """(N, P, L), as the tensors have it."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """(name, tensor) of all that the product reads."""

    @abstractmethod
    def broken(self, act: torch.dtype) -> str | None:
        """What no kernel could multiply activations of dtype ``act`` by, or None. Metadata only."""

    def refuse(self, platform: Platform) -> str | None:
        """Why there is no product on that card, or None. Metadata only."""
        return None

    def missing(self) -> str | None:
        """Why the product cannot be called in this process, or None. May import a vendor's package."""
        return None

    @abstractmethod
    def product(self, q_nope: torch.Tensor) -> torch.Tensor:
        """q_nope [T, N, P] -> [T, N, L], token-major and contiguous, in q_nope's dtype: as vLLM multiplies."""

    @abstractmethod
    def reference(self, q_nope: torch.Tensor) -> torch.Tensor:
        """As ``product``, in plain PyTorch, on any device."""
