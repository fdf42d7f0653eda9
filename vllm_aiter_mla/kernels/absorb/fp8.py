"""W_UK in fp8 with one scale, as vLLM keeps it by default where AITER is on: AITER's batched GEMM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_aiter_mla.kernels import fp8
from vllm_aiter_mla.kernels.absorb.form import AbsorbWeight, Key
from vllm_aiter_mla.kernels.absorb.gemm import AiterGemm
from vllm_aiter_mla.kernels.platform import Platform

GEMM = AiterGemm("batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant", "fp8")
GROUP = 128  # values of a query row that share a scale; vLLM's group_size
FLOOR = 1e-10  # the least that AITER's kernel takes for a group's largest magnitude, in float32


@dataclass(frozen=True, slots=True)
class Fp8Weight(AbsorbWeight):
    """``codes`` [N, L, P] e4m3, vLLM's ``W_K``, and ``scale``, one float32: W_UK = codes * scale."""

    form: ClassVar[str] = "fp8"
    avoid: ClassVar[str] = "set VLLM_ROCM_USE_AITER_FP8BMM=0"
    # A value on a rounding tie may fall to either side by the last bit of a reciprocal, and one such code moves a whole
    # row of products: representable steps would call that wrong.
    product_bound: ClassVar[float] = 0.01
    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def read(cls, tensors: Mapping[str, torch.Tensor]) -> Fp8Weight | None:
        """See the base class."""
        codes, scale = tensors.get("W_K"), tensors.get("W_K_scale")
        return None if codes is None or scale is None or not fp8.is_fp8(codes.dtype) else cls(codes, scale)

    @classmethod
    def make(cls, w_uk_t: torch.Tensor, key: Key) -> Fp8Weight:
        """See the base class; ``key[1]`` is the e4m3 type."""
        flavour = fp8.flavour_of(key[1])
        scale = w_uk_t.float().abs().max() / flavour.max
        return cls(fp8.round_saturating(w_uk_t.transpose(1, 2).contiguous().float() / scale, flavour), scale)

    @property
    def key(self) -> Key:
        """See the base class."""
        return (self.form, self.codes.dtype)

    @property
    def sizes(self) -> tuple[int, ...]:
        """See the base class."""
        heads, *widths = self.codes.shape
        return (heads, *reversed(widths))

    @property
    def tensors(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """See the base class."""
        return (("W_K", self.codes), ("W_K_scale", self.scale))

    def broken(self, act: torch.dtype) -> str | None:
        """See the base class."""
        if not fp8.is_fp8(self.codes.dtype):
            return f"W_K: an e4m3 type expected, got {self.codes.dtype}"
        if self.scale.dtype != torch.float32 or self.scale.numel() < 1:
            return f"W_K_scale: one float32 element expected, got {self.scale.numel()} of {self.scale.dtype}"
        return None

    def refuse(self, platform: Platform) -> str | None:
        """See the base class: the GEMM reads the codes as the card's own type."""
        dtype = self.codes.dtype
        return None if dtype == platform.fp8 else f"W_K: {platform.fp8} expected on {platform.arch}, got {dtype}"

    def missing(self) -> str | None:
        """See the base class."""
        return GEMM.missing()

    def product(self, q_nope: torch.Tensor) -> torch.Tensor:
        """See the base class; vLLM's own call of AITER's GEMM. Only where nothing is ``missing``."""
        return GEMM(
            q_nope.transpose(0, 1), self.codes, self.scale, group_size=GROUP, dtype=q_nope.dtype, transpose_bm=True
        )

    def reference(self, q_nope: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        return absorb_fp8(q_nope, self.codes, self.scale)


def absorb_fp8(q_nope: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """q_nope [T, N, P] x fp8 codes [N, L, P] -> [T, N, L] in q_nope's dtype, as AITER's batched GEMM computes it.

    Each 128 values of a row are quantised by their own largest magnitude, at least 1e-10; the products, exact in
    float32, are summed there and scaled twice. The largest magnitude passes over a NaN, which is then quantised to the
    lowest value: Triton's ``max`` and ``clamp`` become v_max_f32 and v_med3_f32 on gfx9. Source: AITER's kernel.
    """
    flavour = fp8.flavour_of(codes.dtype)
    total = q_nope.new_zeros((codes.shape[0], q_nope.shape[0], codes.shape[1]), dtype=torch.float32)
    for first in range(0, q_nope.shape[2], GROUP):
        group = q_nope[..., first : first + GROUP].transpose(0, 1).float()
        largest = torch.where(group.isnan(), 0.0, group.abs()).amax(-1, keepdim=True).clamp(min=FLOOR)
        step = largest * (1.0 / flavour.max)
        quantised = fp8.round_saturating(group * step.reciprocal(), flavour)
        total += torch.bmm(quantised.float(), codes[..., first : first + GROUP].float().transpose(1, 2)) * step
    return (total * scale.reshape(-1)[0]).to(q_nope.dtype).transpose(0, 1).contiguous()
