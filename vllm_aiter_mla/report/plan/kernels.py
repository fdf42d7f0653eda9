"""Which kernel would take a layer at which batch size: the back ends' own answers, on operands without memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from vllm_aiter_mla.kernels import select
from vllm_aiter_mla.kernels.aiter import contract
from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.aiter.dispatch import PER_HEAD_TOKENS, ViewPolicy
from vllm_aiter_mla.kernels.inputs import DecodeInputs, contract_violation
from vllm_aiter_mla.kernels.platform import Platform, hardware_fp8
from vllm_aiter_mla.kernels.shape import LayerShape, synthetic_inputs
from vllm_aiter_mla.kernels.triton import backend as triton_backend
from vllm_aiter_mla.kernels.triton.tiles import CAPS, TABLE, cap_for, entry_for

# A plan is made for the ROCm release that the AITER path needs; doctor looks at the installed one.
ROCM = (7, 0)


@dataclass(frozen=True, slots=True)
class LayerKernelShape:
    """What decides the kernel of a layer besides the batch size.

    Attributes:
        heads, nope, rope, latent: N, P, R, L.
        act: activation dtype.
        quantised: whether cache and prepared query are fp8.
        block_size: of the KV cache.
        fp8_absorb: whether the absorbed weight is held in fp8.
    """

    heads: int
    nope: int
    rope: int
    latent: int
    act: torch.dtype
    quantised: bool
    block_size: int
    fp8_absorb: bool = False


@dataclass(frozen=True, slots=True)
class KernelSpan:
    """Batch sizes that run alike.

    Attributes:
        first, last: tokens.
        kernel: back end that runs, or None.
        detail: which of its kernels, or which tile.
        refusals: (name, reason) of the back ends passed over.
    """

    first: int
    last: int
    kernel: str | None
    detail: str
    refusals: tuple[tuple[str, str], ...]


def platform_of(arch: str) -> Platform:
    """The card a plan is made for."""
    return Platform(arch, ROCM if arch.startswith("gfx") else None)


def unavailable(kernel: str, arch: str) -> str | None:
    """Why no fused kernel would be chosen in that process at all, or None; as ``runtime.kernel`` decides it."""
    wanted = select.candidates(kernel, platform_of(arch))[0]
    if kernel == "auto" and wanted == "stock":
        return f"auto knows no fused kernel for {arch}; kernel=triton can be asked for by name"
    if wanted == "aiter" and arch not in contract.ARCHITECTURES:
        return f"kernel={kernel}: AITER's op is for gfx942 and gfx950; this card is {arch}"
    return None


def spans(
    kernel: str, arch: str, shape: LayerKernelShape, limit: int, view: str | int = "auto"
) -> tuple[KernelSpan, ...]:
    """The bucket ``1..limit`` cut where the answer changes; ``view`` is the option ``aiter_view``."""
    platform = platform_of(arch)
    # The op is never called: a refusal and a plan are metadata.
    aiter = AiterBackend(platform, op=_never, view=cast(ViewPolicy, view), missing=lambda weight: None)
    found: list[KernelSpan] = []
    for tokens in _points(limit, view):
        one = _at(kernel, platform, aiter, operands(shape, platform, tokens))
        if found and _alike(found[-1], one):
            found[-1] = KernelSpan(found[-1].first, tokens, one.kernel, one.detail, found[-1].refusals)
        else:
            start = found[-1].last + 1 if found else 1
            found.append(KernelSpan(start, tokens, one.kernel, one.detail, one.refusals))
    return tuple(found)


def operands(shape: LayerKernelShape, platform: Platform, tokens: int) -> DecodeInputs:
    """A decode step's operands on the ``meta`` device: shapes, strides and dtypes as vLLM hands them over."""
    stored = platform.fp8 if shape.quantised else shape.act
    layer = LayerShape(
        heads=shape.heads,
        nope_dim=shape.nope,
        cache_dtype=stored,
        out_dtype=stored,
        block_size=shape.block_size,
        is_neox=False,
        act=shape.act,
        device="meta",
        latent=shape.latent,
        rope=shape.rope,
        weight=("fp8", platform.fp8) if shape.fp8_absorb else ("plain",),
    )
    return synthetic_inputs(layer, tokens)


def _points(limit: int, view: str | int) -> list[int]:
    """The last batch size before every border that a back end knows of, up to ``limit``."""
    borders = {PER_HEAD_TOKENS - 1, *((view - 1,) if isinstance(view, int) and view > 1 else ())}
    borders |= {*(entry.max_tokens for entries in TABLE.values() for entry in entries)}
    borders |= {cap.from_tokens - 1 for cap in CAPS if cap.from_tokens > 1}
    return sorted({border for border in borders if border < limit} | {limit})


def _alike(span: KernelSpan, other: KernelSpan) -> bool:
    names = tuple(name for name, _ in span.refusals)
    return (span.kernel, span.detail, names) == (other.kernel, other.detail, tuple(name for name, _ in other.refusals))


def _at(kernel: str, platform: Platform, aiter: AiterBackend, inputs: DecodeInputs) -> KernelSpan:
    refusals: list[tuple[str, str]] = []
    tokens = inputs.num_tokens
    for name in select.candidates(kernel, platform):
        reason, detail = _ask(name, platform, aiter, inputs)
        if reason is None:
            return KernelSpan(tokens, tokens, name, detail, tuple(refusals))
        refusals.append((name, reason))
    return KernelSpan(tokens, tokens, None, "", tuple(refusals))


def _ask(name: str, platform: Platform, aiter: AiterBackend, inputs: DecodeInputs) -> tuple[str | None, str]:
    if name == "aiter":
        if platform.arch not in contract.ARCHITECTURES:
            return f"AITER's op is for gfx942 and gfx950; this card is {platform.arch}", ""
        bound = aiter.bind(inputs)
        return (bound, "") if isinstance(bound, str) else (None, f"its {bound.kernel} kernel")
    if name == "triton":
        entry = entry_for(platform.arch, inputs.num_tokens, inputs.num_heads)
        return _triton(platform, inputs), f"tile {entry.tile.block_t}x{entry.tile.block_l}, {entry.basis}"
    detail = "vLLM's own kernels on private copies" if name == "stock" else "plain PyTorch"
    return contract_violation(inputs), detail


def _triton(platform: Platform, inputs: DecodeInputs) -> str | None:
    """What ``TritonBackend.refuse`` would say there; what it looks at on this machine is answered for that card."""
    for check in triton_backend.ANYWHERE:
        if (reason := check(inputs)) is not None:
            return reason
    native = hardware_fp8(platform.arch)
    if inputs.kv_cache.dtype.itemsize == 1 and inputs.kv_cache.dtype != native:
        return f"kv_cache: {platform.arch} converts to {native} in hardware, not to {inputs.kv_cache.dtype}"
    cap = cap_for(platform.arch, inputs.num_heads, inputs.out_dtype.itemsize == 1, inputs.num_tokens)
    return None if cap is None else f"{inputs.num_tokens} tokens: measured slower from {cap.from_tokens} on"


def _never(*arguments: Any) -> Any:
    raise AssertionError("a plan launches nothing")
