"""The back end ``triton``: what it takes, what it declines and why."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from vllm_aiter_mla.kernels.backend import OWN_BMM, Binding, KernelBackend
from vllm_aiter_mla.kernels.formats import is_fp8
from vllm_aiter_mla.kernels.inputs import DecodeInputs, KernelInputError, contract_violation
from vllm_aiter_mla.kernels.platform import hardware_fp8
from vllm_aiter_mla.kernels.triton import interpreted, tiles
from vllm_aiter_mla.kernels.triton.tiles import BLOCK_K, MXFP4_ARCH, Tile, entry_for

INT32_SPAN = 1 << 31
# Rows that any program addresses with one 32-bit offset: the largest block_t or rope_rows of the table.
BLOCK_ROWS = 128
# Below 16 neither the matrix instructions nor 16-byte accesses have anything to work on.
MIN_WIDTH = 16
# Along the reduction one fp8 matrix instruction multiplies 32 values.
MIN_FP8_WIDTH = 32


class TritonBackend(KernelBackend):
    """One portable launch, absorb BMM included. With ``kernel=auto`` it runs if start-up timed it as the fastest."""

    name = "triton"
    bounds = OWN_BMM

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        """See the base class: one launch, on the tile that belongs to the call's shape.

        Every row of the result is defined. fp8 saturates in both halves; NaN becomes the lowest finite value. The run
        raises KernelCaptureError if a graph is being captured and this variant was not compiled beforehand.
        """
        if find_spec("triton") is None:
            return "the package triton is not installed"
        if (reason := _contract(inputs) or _device(inputs)) is not None:
            return reason
        from vllm_aiter_mla.kernels.triton import launcher

        arch = launcher.current_arch()
        if (reason := refused_on(arch, inputs)) is not None:
            return reason
        tile = entry_for(arch, inputs.num_tokens, inputs.num_heads).tile
        return Binding(partial(_launch, launcher, tile), tile.label)

    def tried_counts(self, inputs: DecodeInputs) -> tuple[int, ...]:
        """See the base class: one for each tile."""
        from vllm_aiter_mla.kernels.triton import launcher

        return tiles.tried_counts(launcher.current_arch(), inputs.num_heads)

    def warm_up(self, template: DecodeInputs, token_counts: Iterable[int]) -> tuple[Tile, ...]:
        """Compile, outside capture, what graphs of ``token_counts`` rows need; see ``launcher.warm_up``.

        Raises:
            KernelInputError: ``refuse`` has a reason against the template's layer.
            ValueError: ``template`` has no row.
        """
        if (reason := self.refuse(template)) is not None:
            raise KernelInputError(f"triton: {reason}")
        from vllm_aiter_mla.kernels.triton import launcher

        return launcher.warm_up(template, token_counts)


def _launch(launcher: Any, tile: Tile, inputs: DecodeInputs) -> torch.Tensor:
    result: torch.Tensor = launcher.launch(inputs, tile)
    return result


def refused_on(arch: str, inputs: DecodeInputs) -> str | None:
    """Return why a card of ``arch`` does not run this call, or None; ``plan`` asks about a card that is not there."""
    found = _contract(inputs) or _widths(inputs) or _layout(inputs) or _spans(inputs)
    return found or _software_fp8(arch, inputs) or _software_mxfp4(arch, inputs)


def _contract(inputs: DecodeInputs) -> str | None:
    if (broken := contract_violation(inputs)) is not None:
        return broken
    if inputs.q.dtype not in (torch.bfloat16, torch.float16):
        return f"q: torch.bfloat16 or torch.float16 expected, got {inputs.q.dtype}"
    if inputs.cos_sin_cache.shape[0] == 0:
        return "cos_sin_cache: at least one row expected, got none"
    return None


def _device(inputs: DecodeInputs) -> str | None:
    device = inputs.q.device
    # Operands without memory ask about a layer, before there is a batch.
    if device.type not in ("cpu" if interpreted() else "cuda", "meta"):
        return f"a GPU is needed, q is on {device.type}"
    for name, tensor in inputs.tensors:
        if tensor.device != device:
            return f"{name}: {device} (that of q) expected, got {tensor.device}"
    return None


def _widths(inputs: DecodeInputs) -> str | None:
    """Also why the reduction over P cannot be cut into blocks: 128 each, the rest a power of two.

    Over mxfp4 P has to be a power of two: at other widths vLLM's own GEMM drops values, so there is nothing right to
    compare with.
    """
    for name, width in {"rope": inputs.rope_dim, "latent": inputs.latent_dim}.items():
        if width < MIN_WIDTH or width & (width - 1):
            return f"{name} width: a power of two from {MIN_WIDTH} on expected, got {width}"
    nope, rest = inputs.nope_dim, inputs.nope_dim % BLOCK_K
    if inputs.weight.format == "mxfp4":
        taken = nope >= BLOCK_K and not nope & (nope - 1)
        return None if taken else f"nope width: 128, 256, 512 and so on expected over mxfp4, got {nope}"
    least = MIN_FP8_WIDTH if inputs.weight.format == "fp8" else MIN_WIDTH
    if nope >= least and (rest == 0 or (rest >= least and rest & (rest - 1) == 0)):
        return None
    return f"nope width: blocks of {BLOCK_K} and a power of two from {least} on expected, got {nope}"


def _layout(inputs: DecodeInputs) -> str | None:
    for name in ("q", "k_pe", "kv_c", "kv_cache", "cos_sin_cache", "slot_mapping", "positions"):
        tensor = getattr(inputs, name)
        if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return f"{name}: last stride 1 expected, got {tensor.stride(-1)}"
    if 1 not in (stride := inputs.weight.as_npl.stride())[1:]:
        return f"{_weight_name(inputs)}: stride 1 along P or L expected, got {stride} of [N, P, L]"
    return None


def _spans(inputs: DecodeInputs) -> str | None:
    """Offsets within a block of rows are 32-bit; the block's own base is 64-bit."""
    rows = min(inputs.num_tokens, BLOCK_ROWS)
    spans = {name: _span(getattr(inputs, name), rows) for name in ("q", "k_pe", "kv_c")}
    spans[_weight_name(inputs)] = _span(inputs.weight.values, 1)
    spans["cos_sin_cache"] = _span(inputs.cos_sin_cache, inputs.cos_sin_cache.shape[0])
    if inputs.weight.format == "mxfp4" and inputs.weight.scale is not None:
        spans["W_K_scale"] = _span(inputs.weight.scale, 1)
    for name, span in spans.items():
        if span >= INT32_SPAN:
            return f"{name}: {span} elements from the first to the last of one block, 32 bits of offset expected"
    return None


def _span(tensor: torch.Tensor, rows: int) -> int:
    """Elements from the first to the last of ``rows`` along the first dimension."""
    inner = sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    return max(rows - 1, 0) * tensor.stride(0) + inner + 1


def _weight_name(inputs: DecodeInputs) -> str:
    return inputs.weight.tensors[0][0]


def _software_fp8(arch: str, inputs: DecodeInputs) -> str | None:
    native = hardware_fp8(arch)
    for name, dtype in (("kv_cache", inputs.kv_cache.dtype), (_weight_name(inputs), inputs.weight.values.dtype)):
        if is_fp8(dtype) and arch != "interpreter" and dtype != native:
            return (
                f"{name}: {arch} converts to {native or 'no e4m3 type'} in hardware, {dtype} would be a software cast"
            )
    return None


def _software_mxfp4(arch: str, inputs: DecodeInputs) -> str | None:
    if inputs.weight.format != "mxfp4" or arch in (MXFP4_ARCH, "interpreter"):
        return None
    return f"W_K: {MXFP4_ARCH} multiplies mxfp4 in hardware, {arch} would in software; {inputs.weight.avoid}"
