# SPDX-License-Identifier: Apache-2.0
"""The absorbed up-projection W_UK in the three formats in which vLLM holds it, and the product with each.

"plain" is the activation dtype. "fp8" is vLLM's default where AITER is on. vLLM uses "mxfp4" on gfx950 if ``kv_b_proj``
is bf16. Over codes the product is vLLM's own call, handed in through ``GEMMS``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm_aiter_mla.kernels import formats
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.triton.tiles import MXFP4_ARCH

Key = tuple[Any, ...]

GEMMS: dict[str, Callable[..., torch.Tensor]] = {}
"""vLLM's calls of AITER's batched GEMMs, by weight format; ``backends.Backends`` fills it on an AMD card. They are
vLLM's functions, the same for every engine of the process."""
P_MAJOR = "P-major"
"""In the key of a plain weight that is dense along P, as vLLM dequantises ``kv_b_proj``; otherwise it is along L."""
FP8_GROUP = 128  # values of a query row that share a scale; vLLM's group_size
FP8_FLOOR = 1e-10  # AITER's kernel takes at least this for a group's largest magnitude, in float32


class Format(NamedTuple):
    """What the formats differ in: bytes of a value of W_UK, and ``AbsorbWeight.product_bound``."""

    bytes: float
    bound: float


# fp8: a value on a rounding tie may fall to either side by the last bit of a reciprocal, and one such code moves a
# whole row of products, so that representable steps would call it wrong. mxfp4: all sums are exact and both sides round
# to bf16 once, 0.2 %; a wrong rounding of q or a wrong scale costs 5 %. 32 values have 16 bytes and one of scale.
FORMATS = {"plain": Format(2, 0.0), "fp8": Format(1, 0.01), "mxfp4": Format(17 / 32, 0.01)}


class UnknownWeightError(ValueError):
    """A layer holds its absorbed weight in an unknown format; the message names its tensors."""


@dataclass(frozen=True, slots=True)
class AbsorbWeight:
    """W_UK of one layer. N heads, P nope width, L latent width."""

    format: str  # one of ``FORMATS``
    # "plain": [N, P, L] in the activation dtype, any strides. "fp8": e4m3 codes [N, L, P]. "mxfp4": uint8 codes
    # [N, L, P/2]; vLLM leaves a transposed view with strides (P/2, N * P/2, 1).
    values: torch.Tensor
    # "plain": None. "fp8": one float32, W_UK = codes * scale. "mxfp4": e8m0 uint8 [N, L, P/32]; vLLM leaves strides
    # (1, N, L * N).
    scale: torch.Tensor | None = None

    @property
    def key(self) -> Key:
        """(format, dtype of fp8 codes or ``P_MAJOR``): what a choice of kernel must know of the weight."""
        if self.format == "fp8":
            return (self.format, self.values.dtype)
        is_p_major = self.format == "plain" and self.values.stride(-1) != 1
        return (self.format, P_MAJOR) if is_p_major else (self.format,)

    @property
    def sizes(self) -> tuple[int, ...]:
        """(N, P, L), as the values have it."""
        if self.format == "plain":
            return tuple(self.values.shape)
        heads, *widths = self.values.shape
        latent_and_nope = widths if self.format == "fp8" else [*widths[:-1], 2 * widths[-1]]
        return (heads, *reversed(latent_and_nope))

    @property
    def as_npl(self) -> torch.Tensor:
        """The values as the Triton kernel reads them, without a copy: [N, P, L], or uint8 [N, P/2, L] of mxfp4."""
        return self.values if self.format == "plain" else self.values.transpose(1, 2)

    @property
    def tensors(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """(name, tensor) of everything that the product reads."""
        if self.scale is None:
            return (("w_uk_t", self.values),)
        return (("W_K", self.values), ("W_K_scale", self.scale))

    @property
    def product_bound(self) -> float:
        """Largest ||product - reference|| / ||reference|| that counts as right; 0 if both are the same function."""
        return FORMATS[self.format].bound

    def broken(self, act: torch.dtype) -> str | None:
        """Return why no kernel can multiply activations of dtype ``act`` by it, or None. Metadata only."""
        dtype, scale = self.values.dtype, self.scale
        if self.format == "plain" or scale is None:
            return None if dtype == act else f"w_uk_t: dtype {act} (that of q) expected as plain weights, got {dtype}"
        if self.format == "fp8":
            if not formats.is_fp8(dtype):
                return f"W_K: an e4m3 type expected, got {dtype}"
            if scale.dtype != torch.float32 or scale.numel() < 1:
                return f"W_K_scale: one float32 element expected, got {scale.numel()} of {scale.dtype}"
            return None
        for name, tensor in self.tensors:
            if tensor.dtype != torch.uint8:
                return f"{name}: torch.uint8 expected in the mxfp4 format, got {tensor.dtype}"
        heads, nope, latent = self.sizes
        if nope % formats.MXFP4_GROUP or tuple(scale.shape) != (heads, latent, nope // formats.MXFP4_GROUP):
            return f"W_K_scale: one scale per 32 values of {heads}, {latent}, {nope}, got {list(scale.shape)}"
        return None if act == torch.bfloat16 else f"W_K: bf16 activations expected beside mxfp4, got {act}"

    def refuse(self, platform: Platform) -> str | None:
        """Return why AITER has no right product on that card, or None. Metadata only.

        AITER's fp8 GEMM reads the codes as the card's own type.
        """
        if self.format == "fp8" and self.values.dtype != platform.fp8:
            return f"W_K: {platform.fp8} expected on {platform.arch}, got {self.values.dtype}"
        if self.format != "mxfp4":
            return None
        if platform.arch != MXFP4_ARCH:
            return f"W_K: AITER multiplies mxfp4 on {MXFP4_ARCH} only, not on {platform.arch}"
        return drops_values(self.format, self.sizes[1]) or None

    def product(self, q_nope: torch.Tensor, more: Mapping[str, Any] = {}) -> torch.Tensor:
        """Multiply q_nope [T, N, P] as vLLM does: [T, N, L], token-major and contiguous, in q_nope's dtype.

        ``more`` is handed to the call that multiplies codes.

        Over mxfp4 vLLM passes ``y_scale=_q_scale`` if the query is fp8: AITER divides by it, and quantises by it once
        more afterwards. The fused op divides by it too, so none is passed here.

        Raises:
            KeyError: the weight is held in codes and ``GEMMS`` has no call for them: not on an AMD card.
            ImportError: AITER's GEMM cannot be imported.
        """
        if self.scale is None:
            return absorb_plain(q_nope, self.values)
        options: dict[str, Any] = {"prequant": True}
        if self.format == "fp8":
            options = {"group_size": FP8_GROUP, "dtype": q_nope.dtype}
        gemm = GEMMS[self.format]
        return gemm(q_nope.transpose(0, 1), self.values, self.scale, transpose_bm=True, **options, **more)

    def reference(self, q_nope: torch.Tensor) -> torch.Tensor:
        """Return what ``product`` does, in plain PyTorch, on any device."""
        if self.scale is None:
            return absorb_plain(q_nope, self.values)
        if self.format == "fp8":
            return absorb_fp8(q_nope, self.values, self.scale)
        assert self.format == "mxfp4"
        return dot_mxfp4(q_nope, self.values, self.scale).to(q_nope.dtype).contiguous()


def drops_values(format: str, nope: int) -> str:
    """Return why AITER's GEMM, which vLLM calls too, has no right product over a weight of nope width P, or "".

    Over mxfp4 it bounds q by half its width wherever its block does not divide P, so that it drops half of q's values:
    at P = 192 its own results show it (aiter#4181). Its blocks are powers of two, and none smaller than 128 was run.
    """
    if format != "mxfp4" or (nope >= 128 and not nope & (nope - 1)):
        return ""
    expected = "a nope width of 128, 256, 512 and so on expected over mxfp4"
    return f"W_K: {expected}, got {nope}: AITER's GEMM drops values there"


def read(tensors: Mapping[str, torch.Tensor]) -> AbsorbWeight:
    """Return the absorbed weight in a layer's tensors, by vLLM's names for them ("W_UK_T", "W_K", ...).

    Raises:
        UnknownWeightError: the tensors are of no known format.
    """
    plain, codes, scale = (tensors.get(name) for name in ("W_UK_T", "W_K", "W_K_scale"))
    if plain is not None and plain.dtype.is_floating_point:
        return AbsorbWeight("plain", plain)
    if codes is not None and scale is not None:
        if formats.is_fp8(codes.dtype):
            return AbsorbWeight("fp8", codes, scale)
        if (codes.dtype, scale.dtype) == (torch.uint8, torch.uint8):
            return AbsorbWeight("mxfp4", codes, scale)
    given = ", ".join(f"{name} of {tensor.dtype}" for name, tensor in tensors.items()) or "nothing"
    raise UnknownWeightError(f"no known format of the absorbed weight in {given}")


def make(w_uk_t: torch.Tensor, key: Key) -> AbsorbWeight:
    """Convert ``w_uk_t`` [N, P, L] to the format of ``key``, with vLLM's strides: for synthetic operands.

    A plain weight is a view of ``kv_b_proj``, which holds W_UV beside each head's W_UK; here it holds W_UK twice. The
    strides are those of unquantised weights, or with ``P_MAJOR`` those of vLLM's dequantised ones.
    """
    if key[0] == "fp8":
        flavour = formats.FLAVOURS[key[1]]
        scale = w_uk_t.float().abs().max() / flavour.max
        codes = formats.round_saturating(w_uk_t.transpose(1, 2).contiguous().float() / scale, flavour)
        return AbsorbWeight("fp8", codes, scale)
    if key[0] == "mxfp4":
        codes, scales = formats.quantise_mxfp4(w_uk_t.permute(2, 0, 1))
        by_group = scales.permute(2, 0, 1).contiguous()
        return AbsorbWeight("mxfp4", codes.transpose(0, 1), by_group.permute(2, 1, 0))
    nope, kv_b_proj = w_uk_t.shape[1], torch.cat((w_uk_t, w_uk_t), dim=1)
    if P_MAJOR in key:
        return AbsorbWeight("plain", kv_b_proj.permute(2, 0, 1).contiguous()[..., :nope].permute(1, 2, 0))
    return AbsorbWeight("plain", kv_b_proj[:, :nope])


def absorb_plain(q_nope: torch.Tensor, w_uk_t: torch.Tensor) -> torch.Tensor:
    """q_nope [T, N, P] x W_UK_T [N, P, L] -> [T, N, L], token-major and contiguous, rounded to the activation dtype.

    Writes the batched product straight into the token-major buffer, as vLLM's ``forward_impl`` does.
    """
    tokens, heads, latent = q_nope.shape[0], w_uk_t.shape[0], w_uk_t.shape[2]
    by_head = q_nope.new_empty_strided((heads, tokens, latent), (latent, heads * latent, 1))
    torch.bmm(q_nope.transpose(0, 1), w_uk_t, out=by_head)
    return by_head.transpose(0, 1)


def absorb_fp8(q_nope: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """q_nope [T, N, P] x fp8 codes [N, L, P] -> [T, N, L] in q_nope's dtype, as AITER's batched GEMM computes it.

    Each 128 values of a row are quantised by their own largest magnitude, at least 1e-10. The products, exact in
    float32, are summed there and scaled twice. The largest magnitude ignores a NaN, which is then quantised to the
    lowest value: Triton's ``max`` and ``clamp`` become v_max_f32 and v_med3_f32 on gfx9. Source: AITER's kernel.
    """
    flavour = formats.FLAVOURS[codes.dtype]
    total = q_nope.new_zeros((codes.shape[0], q_nope.shape[0], codes.shape[1]), dtype=torch.float32)
    for first in range(0, q_nope.shape[2], FP8_GROUP):
        group = q_nope[..., first : first + FP8_GROUP].transpose(0, 1).float()
        largest = torch.where(group.isnan(), 0.0, group.abs()).amax(-1, keepdim=True).clamp(min=FP8_FLOOR)
        step = largest * (1.0 / flavour.max)
        quantised = formats.round_saturating(group * step.reciprocal(), flavour)
        total += torch.bmm(quantised.float(), codes[..., first : first + FP8_GROUP].float().transpose(1, 2)) * step
    return (total * scale.reshape(-1)[0]).to(q_nope.dtype).transpose(0, 1).contiguous()


def dot_mxfp4(q_nope: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """q_nope [T, N, P] x mxfp4 W_UK -> float32 [T, N, L], not rounded: as AITER's batched GEMM sums it.

    Each 32 values of a row of q are quantised to mxfp4 like the weight. The products are small multiples of powers of
    two and their sums exact in float32, unless the scales of a row lie more than about 2**10 apart.
    """
    quantised = formats.dequantise_mxfp4(*formats.quantise_mxfp4(q_nope)).transpose(0, 1)
    return torch.bmm(quantised, formats.dequantise_mxfp4(codes, scales).transpose(1, 2)).transpose(0, 1)
