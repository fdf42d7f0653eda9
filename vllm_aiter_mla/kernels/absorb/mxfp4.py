"""W_UK in mxfp4, as vLLM keeps it on gfx950 where ``kv_b_proj`` is bf16: AITER's batched GEMM quantises q as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_aiter_mla.kernels import mxfp4
from vllm_aiter_mla.kernels.absorb.form import AbsorbWeight, Key
from vllm_aiter_mla.kernels.absorb.gemm import AiterGemm
from vllm_aiter_mla.kernels.platform import Platform

GEMM = AiterGemm("batched_gemm_a16wfp4", "mxfp4")
ARCH = "gfx950"  # vLLM asks for CDNA 4, AITER for a card that multiplies mxfp4


@dataclass(frozen=True, slots=True)
class Mxfp4Weight(AbsorbWeight):
    """``codes`` uint8 [N, L, P/2], vLLM's ``W_K``, and ``scales`` uint8 [N, L, P/32], e8m0; any strides.

    vLLM leaves both as transposed views of what was quantised as [L, N, P]: strides of the codes
    (P/2, N * P/2, 1), of the scales (1, N, L * N).
    """

    form: ClassVar[str] = "mxfp4"
    avoid: ClassVar[str] = "set VLLM_ROCM_USE_AITER_FP4BMM=0, and VLLM_ROCM_USE_AITER_FP8BMM=0 for 16 bits; W_UV too"
    # All sums are exact and both sides round to bf16 once, 0.2 %; a wrong rounding of q or a wrong scale costs 5 %.
    product_bound: ClassVar[float] = 0.01
    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def read(cls, tensors: Mapping[str, torch.Tensor]) -> Mxfp4Weight | None:
        """See the base class."""
        codes, scales = tensors.get("W_K"), tensors.get("W_K_scale")
        if codes is None or scales is None or (codes.dtype, scales.dtype) != (torch.uint8, torch.uint8):
            return None
        return cls(codes, scales)

    @classmethod
    def make(cls, w_uk_t: torch.Tensor, key: Key) -> Mxfp4Weight:
        """See the base class; with the strides that vLLM leaves."""
        codes, scales = mxfp4.quantise(w_uk_t.permute(2, 0, 1))
        by_group = scales.permute(2, 0, 1).contiguous()
        return cls(codes.transpose(0, 1), by_group.permute(2, 1, 0))

    @property
    def key(self) -> Key:
        """See the base class."""
        return (self.form,)

    @property
    def sizes(self) -> tuple[int, ...]:
        """See the base class."""
        heads, latent, half = self.codes.shape
        return (heads, 2 * half, latent)

    @property
    def tensors(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """See the base class."""
        return (("W_K", self.codes), ("W_K_scale", self.scales))

    def broken(self, act: torch.dtype) -> str | None:
        """See the base class: vLLM's call always gives bf16."""
        for name, tensor in self.tensors:
            if tensor.dtype != torch.uint8:
                return f"{name}: torch.uint8 expected in the mxfp4 form, got {tensor.dtype}"
        heads, nope, latent = self.sizes
        if nope % mxfp4.GROUP or tuple(self.scales.shape) != (heads, latent, nope // mxfp4.GROUP):
            return f"W_K_scale: one scale per 32 values of {heads}, {latent}, {nope}, got {list(self.scales.shape)}"
        return None if act == torch.bfloat16 else f"W_K: bf16 activations expected beside mxfp4, got {act}"

    def refuse(self, platform: Platform) -> str | None:
        """See the base class.

        AITER's kernel bounds q by half its width wherever its block does not divide P, so that it drops half of q's
        values: at P = 192 its own results show it. Its blocks are powers of two, and smaller than 128 none was run.
        """
        if platform.arch != ARCH:
            return f"W_K: AITER multiplies mxfp4 on {ARCH} only, not on {platform.arch}"
        nope = self.sizes[1]
        if nope < 128 or nope & (nope - 1):
            return f"W_K: a nope width of 128, 256, 512 and so on expected, got {nope}: AITER's GEMM drops values there"
        return None

    def missing(self) -> str | None:
        """See the base class."""
        return GEMM.missing()

    def product(self, q_nope: torch.Tensor) -> torch.Tensor:
        """See the base class; vLLM's own call of AITER's GEMM, but for the scale of the result.

        vLLM passes ``y_scale=_q_scale`` beside an fp8 query, by which AITER divides, and quantises by it once more
        afterwards. The fused op divides by it too, so that none is passed here.
        """
        return GEMM(q_nope.transpose(0, 1), self.codes, self.scales, transpose_bm=True, prequant=True)

    def reference(self, q_nope: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        return absorb_mxfp4(q_nope, self.codes, self.scales)


def absorb_mxfp4(q_nope: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """q_nope [T, N, P] x mxfp4 W_UK -> [T, N, L] in q_nope's dtype, as AITER's batched GEMM without ``y_scale``."""
    return dot_mxfp4(q_nope, codes, scales).to(q_nope.dtype).contiguous()


def dot_mxfp4(q_nope: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """q_nope [T, N, P] x mxfp4 W_UK -> float32 [T, N, L], not rounded: as AITER's batched GEMM sums it.

    Each 32 values of a row of q are quantised to mxfp4 like the weight. The products are small multiples of powers of
    two and their sums exact in float32, unless the scales of a row lie more than about 2**10 apart.
    """
    quantised = mxfp4.dequantise(*mxfp4.quantise(q_nope)).transpose(0, 1)
    return torch.bmm(quantised, mxfp4.dequantise(codes, scales).transpose(1, 2)).transpose(0, 1)
