"""The back end ``triton``: what it takes, what it declines and why, and the call itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from vllm_aiter_mla.kernels import fp8
from vllm_aiter_mla.kernels.absorb.plain import PlainWeight, plain
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend
from vllm_aiter_mla.kernels.compare import OWN_BMM
from vllm_aiter_mla.kernels.inputs import DecodeInputs, KernelInputError, contract_violation
from vllm_aiter_mla.kernels.platform import hardware_fp8
from vllm_aiter_mla.kernels.triton import interpreted
from vllm_aiter_mla.kernels.triton.tiles import Tile, cap_for

# Below 16 neither the matrix instructions nor 16-byte accesses have anything to work on.
MIN_WIDTH = 16
INT32_SPAN = 1 << 31
# Rows that any program addresses with one 32-bit offset: the largest block_t or rope_rows of the table.
BLOCK_ROWS = 128


class TritonBackend(KernelBackend):
    """One portable launch, absorb BMM included. Opt-in until a user measures it on his card."""

    name = "triton"
    bounds = OWN_BMM

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        """See the base class: one launch, on the tile that belongs to the call's shape.

        Every row of the result is defined. fp8 saturates in both halves; NaN becomes the lowest finite value. The run
        raises KernelCaptureError where a graph is being captured and this variant was not compiled beforehand.
        """
        reason = next((reason for check in _CHECKS if (reason := check(inputs)) is not None), None)
        if reason is not None:
            return reason
        from vllm_aiter_mla.kernels.triton import launcher

        return Binding(partial(_launch, launcher, launcher.entry(inputs).tile))

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

        return launcher.warm_up(template, [count for count in token_counts if _capped(template, count) is None])


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
    if not isinstance(inputs.weight, PlainWeight):
        return f"W_UK: {inputs.q.dtype} expected, got the form {inputs.weight.form}; {inputs.weight.avoid}"
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
    widths = {"nope": inputs.nope_dim, "rope": inputs.rope_dim, "latent": inputs.latent_dim}
    for name, width in widths.items():
        if width < MIN_WIDTH or width & (width - 1):
            return f"{name} width: a power of two from {MIN_WIDTH} on expected, got {width}"
    return None


def _layout(inputs: DecodeInputs) -> str | None:
    for name in ("q", "k_pe", "kv_c", "kv_cache", "cos_sin_cache", "slot_mapping", "positions"):
        tensor = getattr(inputs, name)
        if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return f"{name}: last stride 1 expected, got {tensor.stride(-1)}"
    if 1 not in (stride := plain(inputs.weight).stride())[1:]:
        return f"w_uk_t: stride 1 along P or L expected, got {stride}"
    return None


def _spans(inputs: DecodeInputs) -> str | None:
    """Offsets within a block of rows are 32-bit; the block's own base is 64-bit."""
    spans = {
        "q": _span(inputs.q, min(inputs.num_tokens, BLOCK_ROWS)),
        "k_pe": _span(inputs.k_pe, min(inputs.num_tokens, BLOCK_ROWS)),
        "kv_c": _span(inputs.kv_c, min(inputs.num_tokens, BLOCK_ROWS)),
        "w_uk_t": _span(plain(inputs.weight), 1),
        "cos_sin_cache": _span(inputs.cos_sin_cache, inputs.cos_sin_cache.shape[0]),
    }
    for name, span in spans.items():
        if span >= INT32_SPAN:
            return f"{name}: {span} elements from the first to the last of one block, 32 bits of offset expected"
    return None


def _span(tensor: torch.Tensor, rows: int) -> int:
    """Elements from the first to the last of ``rows`` along the first dimension."""
    inner = sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    return max(rows - 1, 0) * tensor.stride(0) + inner + 1


def _fp8(inputs: DecodeInputs) -> str | None:
    from vllm_aiter_mla.kernels.triton import launcher

    dtype = inputs.kv_cache.dtype
    if not fp8.is_fp8(dtype):
        return None if dtype == inputs.q.dtype else f"kv_cache: an e4m3 type or {inputs.q.dtype} expected, got {dtype}"
    arch = launcher.current_arch()
    native = hardware_fp8(arch)
    if arch == "interpreter" or native == dtype:
        return None
    return f"kv_cache: {arch} converts to {native or 'no e4m3 type'} in hardware, {dtype} would be a software cast"


def _capped(inputs: DecodeInputs, tokens: int) -> str | None:
    from vllm_aiter_mla.kernels.triton import launcher

    cap = cap_for(launcher.current_arch(), inputs.num_heads, fp8.is_fp8(inputs.out_dtype), tokens)
    if cap is None:
        return None
    return f"{tokens} tokens: measured slower than the unfused sequence from {cap.from_tokens} on ({cap.basis})"


def _cap(inputs: DecodeInputs) -> str | None:
    return _capped(inputs, inputs.num_tokens)


ANYWHERE: tuple[Callable[[DecodeInputs], str | None], ...] = (_contract, _widths, _layout, _spans)
"""The checks that depend on the operands alone; ``plan`` asks them about a card that is not there."""

_CHECKS = (_no_triton, _contract, _device, _widths, _layout, _spans, _fp8, _cap)
