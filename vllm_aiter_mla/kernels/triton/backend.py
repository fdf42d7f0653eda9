"""The back end ``triton``: what it takes, what it declines and why, and the call itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

import torch

from vllm_aiter_mla.kernels import fp8
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend
from vllm_aiter_mla.kernels.compare import OWN_BMM
from vllm_aiter_mla.kernels.inputs import DecodeInputs, KernelInputError, contract_violation
from vllm_aiter_mla.kernels.platform import hardware_fp8
from vllm_aiter_mla.kernels.triton import interpreted, tiles
from vllm_aiter_mla.kernels.triton.tiles import MXFP4_ARCH, Tile, cap_for, entry_for
from vllm_aiter_mla.kernels.triton.weights import MIN_WIDTH, Operand, operand, width_violation

INT32_SPAN = 1 << 31
# Rows that any program addresses with one 32-bit offset: the largest block_t or rope_rows of the table.
BLOCK_ROWS = 128


class TritonBackend(KernelBackend):
    """One portable launch, absorb BMM included. With ``kernel=auto`` it runs where start-up timed it as the fastest."""

    name = "triton"
    bounds = OWN_BMM

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        """See the base class: one launch, on the tile that belongs to the call's shape.

        Every row of the result is defined. fp8 saturates in both halves; NaN becomes the lowest finite value. The run
        raises KernelCaptureError where a graph is being captured and this variant was not compiled beforehand.
        """
        reason = next((reason for check in _HERE if (reason := check(inputs)) is not None), None)
        if reason is not None:
            return reason
        from vllm_aiter_mla.kernels.triton import launcher

        arch = launcher.current_arch()
        reason = refused_on(arch, inputs)
        if reason is not None:
            return reason
        tile = entry_for(arch, inputs.num_tokens, inputs.num_heads).tile
        return Binding(partial(_launch, launcher, tile), tile.label)

    def tried_counts(self, inputs: DecodeInputs) -> tuple[int, ...]:
        """See the base class: one for each tile."""
        from vllm_aiter_mla.kernels.triton import launcher

        return tiles.tried_counts(launcher.current_arch(), inputs.num_heads)

    def warm_up(self, template: DecodeInputs, token_counts: Iterable[int]) -> tuple[Tile, ...]:
        """Compile, outside capture, what graphs of ``token_counts`` rows need; see ``launcher.warm_up``.

        Counts past a measured cap are left out: this back end does not take them.

        Raises:
            KernelInputError: ``refuse`` has a reason against the template's layer.
            ValueError: ``template`` has no row.
        """
        reason = self.refuse(template)
        if reason is not None:
            raise KernelInputError(f"triton: {reason}")
        from vllm_aiter_mla.kernels.triton import launcher

        arch = launcher.current_arch()
        return launcher.warm_up(template, [count for count in token_counts if _capped(arch, template, count) is None])


def _launch(launcher: Any, tile: Tile, inputs: DecodeInputs) -> torch.Tensor:
    result: torch.Tensor = launcher.launch(inputs, tile)
    return result


def _no_triton(inputs: DecodeInputs) -> str | None:
    return None if find_spec("triton") else "the package triton is not installed"


def _contract(inputs: DecodeInputs) -> str | None:
    broken = contract_violation(inputs)
    if broken is not None:
        return broken
    if inputs.q.dtype not in (torch.bfloat16, torch.float16):
        return f"q: torch.bfloat16 or torch.float16 expected, got {inputs.q.dtype}"
    weight = operand(inputs.weight)
    if isinstance(weight, str):
        return weight
    if inputs.cos_sin_cache.shape[0] == 0:
        return "cos_sin_cache: at least one row expected, got none"
    return None


def _device(inputs: DecodeInputs) -> str | None:
    device = inputs.q.device
    if device.type != ("cpu" if interpreted() else "cuda"):
        return f"a GPU is needed, q is on {device.type}"
    for name, tensor in inputs.tensors:
        if tensor.device != device:
            return f"{name}: {device} (that of q) expected, got {tensor.device}"
    return None


def _widths(inputs: DecodeInputs) -> str | None:
    for name, width in {"rope": inputs.rope_dim, "latent": inputs.latent_dim}.items():
        if width < MIN_WIDTH or width & (width - 1):
            return f"{name} width: a power of two from {MIN_WIDTH} on expected, got {width}"
    return width_violation(inputs.nope_dim, _weight(inputs))


def _weight(inputs: DecodeInputs) -> Operand:
    """What the kernel loads of the weight; ``_contract`` has refused the other forms."""
    return cast(Operand, operand(inputs.weight))


def _layout(inputs: DecodeInputs) -> str | None:
    for name in ("q", "k_pe", "kv_c", "kv_cache", "cos_sin_cache", "slot_mapping", "positions"):
        tensor = getattr(inputs, name)
        if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return f"{name}: last stride 1 expected, got {tensor.stride(-1)}"
    weight = _weight(inputs)
    if 1 not in (stride := weight.values.stride())[1:]:
        return f"{weight.name}: stride 1 along P or L expected, got {stride} of [N, P, L]"
    return None


def _spans(inputs: DecodeInputs) -> str | None:
    """Offsets within a block of rows are 32-bit; the block's own base is 64-bit."""
    weight = _weight(inputs)
    spans = {
        "q": _span(inputs.q, min(inputs.num_tokens, BLOCK_ROWS)),
        "k_pe": _span(inputs.k_pe, min(inputs.num_tokens, BLOCK_ROWS)),
        "kv_c": _span(inputs.kv_c, min(inputs.num_tokens, BLOCK_ROWS)),
        weight.name: _span(weight.values, 1),
        "cos_sin_cache": _span(inputs.cos_sin_cache, inputs.cos_sin_cache.shape[0]),
    }
    if weight.is_mxfp4 and weight.scale is not None:
        spans["W_K_scale"] = _span(weight.scale, 1)
    for name, span in spans.items():
        if span >= INT32_SPAN:
            return f"{name}: {span} elements from the first to the last of one block, 32 bits of offset expected"
    return None


def _span(tensor: torch.Tensor, rows: int) -> int:
    """Elements from the first to the last of ``rows`` along the first dimension."""
    inner = sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    return max(rows - 1, 0) * tensor.stride(0) + inner + 1


def _software_fp8(arch: str, inputs: DecodeInputs) -> str | None:
    cache, native, weight = inputs.kv_cache.dtype, hardware_fp8(arch), _weight(inputs)
    if not fp8.is_fp8(cache) and cache != inputs.q.dtype:
        return f"kv_cache: an e4m3 type or {inputs.q.dtype} expected, got {cache}"
    for name, dtype in (("kv_cache", cache), (weight.name, weight.values.dtype)):
        if fp8.is_fp8(dtype) and arch != "interpreter" and dtype != native:
            return (
                f"{name}: {arch} converts to {native or 'no e4m3 type'} in hardware, {dtype} would be a software cast"
            )
    return None


def _software_mxfp4(arch: str, inputs: DecodeInputs) -> str | None:
    if not _weight(inputs).is_mxfp4 or arch in (MXFP4_ARCH, "interpreter"):
        return None
    return f"W_K: {MXFP4_ARCH} multiplies mxfp4 in hardware, {arch} would in software; {inputs.weight.avoid}"


def _capped(arch: str, inputs: DecodeInputs, tokens: int) -> str | None:
    cap = cap_for(arch, inputs.num_heads, fp8.is_fp8(inputs.out_dtype), tokens)
    if cap is None:
        return None
    return f"{tokens} tokens: measured slower than the unfused sequence from {cap.from_tokens} on ({cap.basis})"


def refused_on(arch: str, inputs: DecodeInputs) -> str | None:
    """Why a card of ``arch`` does not run this call, or None; ``plan`` asks about a card that is not there."""
    for check in (_contract, _widths, _layout, _spans):
        if (reason := check(inputs)) is not None:
            return reason
    for on_card in (_software_fp8, _software_mxfp4):
        if (reason := on_card(arch, inputs)) is not None:
            return reason
    return _capped(arch, inputs, inputs.num_tokens)


_HERE: tuple[Callable[[DecodeInputs], str | None], ...] = (_no_triton, _contract, _device)
