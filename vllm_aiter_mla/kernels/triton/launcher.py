# SPDX-License-Identifier: Apache-2.0
"""From ``DecodeInputs`` to one launch of the kernel."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from triton import cdiv

from vllm_aiter_mla.kernels import backend, formats
from vllm_aiter_mla.kernels.absorb import AbsorbWeight
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.kernels.triton import interpreted
from vllm_aiter_mla.kernels.triton.kernel import decode_prep_kernel
from vllm_aiter_mla.kernels.triton.tiles import FP_FUSION, INT32_SPAN, Tile

# Releases of Triton whose compiled kernels are launched as ``Direct`` does.
RELEASES = ("3.6", "3.7", "3.8", "3.9")
# Of the operands of ``Launch``, those on whose 16-byte alignment Triton specialises. It also asks of each whether
# offsets fit 32 bits. All but the cache keep their sizes and strides, so what the first call was given serves the next.
SPECIALISED = (0, 1, 4, 6, 7, 8, 11)


def programs(tokens: int, heads: int, latent: int, tile: Tile) -> tuple[int, int, int, int]:
    """Return how many programs of each kind the one-dimensional grid has, in its order: the kernel's docstring."""
    width, blocks = tile.columns(latent)
    query = heads * cdiv(tokens, tile.block_t) * (latent // (width * blocks))
    rope = cdiv(tokens * heads, tile.rope_rows)
    return query, rope, cdiv(tokens, tile.rope_rows), cdiv(tokens, tile.kv_rows)


def constants(inputs: DecodeInputs, tile: Tile) -> dict[str, Any]:
    """Return the kernel's compile-time arguments for these operands. Metadata only."""
    width, blocks = tile.columns(inputs.latent_dim)
    return {
        "N": inputs.num_heads, "M": inputs.out_heads or inputs.num_heads,
        "P": inputs.nope_dim, "R": inputs.rope_dim, "L": inputs.latent_dim,
        "BLOCK_SIZE": inputs.kv_cache.shape[1], "IS_NEOX": inputs.is_neox,
        "Q_FP8_MAX": _fp8_max(inputs.out_dtype), "KV_FP8_MAX": _fp8_max(inputs.kv_cache.dtype),
        "W_FP8_MAX": _fp8_max(inputs.weight.values.dtype),
        "BLOCK_T": tile.block_t, "BLOCK_L": width, "BLOCKS": blocks,
        "ROPE_ROWS": tile.rope_rows, "KV_ROWS": tile.kv_rows,
    }  # fmt: skip


def strides(inputs: DecodeInputs) -> tuple[int, ...]:
    """Return the kernel's stride arguments in its order, in elements; zeros for scales that it does not step over."""
    q, cache, scale = inputs.q, inputs.kv_cache, inputs.weight.scale
    w = inputs.weight.as_npl
    return (
        _row_stride(q, 0), _row_stride(q, 1),
        _row_stride(w, 0), w.stride(1), w.stride(2),
        *(scale.stride() if scale is not None and inputs.weight.format == "mxfp4" else (0, 0, 0)),
        _row_stride(inputs.cos_sin_cache, 0), _row_stride(inputs.k_pe, 0), _row_stride(inputs.kv_c, 0),
        _row_stride(cache, 0), _row_stride(cache, 1),
    )  # fmt: skip


class Launch:
    """The kernel bound to calls of one shape: what follows from the shape is computed once.

    The first launch of a variant goes through Triton's dispatch, which compiles it. Later ones go to its own launcher,
    where the release is known: the dispatch would take more of the host's time than all else in a layer.

    A weight may be loaded again into the same object, at another address or with other strides. What was computed from
    the weight belongs to its address, shape, strides and dtype, and is computed again when one of these has changed.
    """

    def __init__(self, inputs: DecodeInputs, tile: Tile) -> None:
        self._tile = tile
        self._read(inputs)

    def _read(self, inputs: DecodeInputs) -> None:
        tokens, tile = inputs.num_tokens, self._tile
        self._held, self._weight = _held(inputs.weight), inputs.weight.as_npl
        self._rows = (tokens, inputs.cos_sin_cache.shape[0] - 1)
        self._strides = strides(inputs)
        kinds = programs(tokens, inputs.num_heads, inputs.latent_dim, tile)
        # Those that write KV rows come last, and do not run without a cache.
        self._grid = (sum(kinds if inputs.kv_cache.numel() else kinds[:2]),)
        self._constants = constants(inputs, tile)
        self._named = self._constants | {"num_warps": tile.num_warps, "num_stages": 1, "enable_fp_fusion": FP_FUSION}
        if card().rocm is not None and not interpreted():
            self._named["matrix_instr_nonkdim"] = tile.mfma
        classes = tuple((stride == 1, stride % 16 == 0, stride < INT32_SPAN) for stride in self._strides)
        kept = (inputs.q, inputs.k_pe, inputs.kv_c, self._weight, inputs.kv_cache, inputs.cos_sin_cache)
        dtypes = (*(tensor.dtype for tensor in kept), inputs.out_dtype)
        self._kind = (inputs.q.device, tile, dtypes, classes, tuple(self._constants.values()))
        self._compiled: dict[tuple[bool, tuple[bool, ...]], Direct | None] = {}

    def __call__(self, inputs: DecodeInputs) -> torch.Tensor:
        """Run the kernel once on the current stream. The caller has checked the operands.

        Returns:
            q_prepared [T, N, L+R] of ``inputs.out_dtype``, or [T, M, L+R], contiguous: the only allocation.

        Raises:
            KernelCaptureError: a graph is being captured and ``TritonBackend.warm_up`` has not compiled this variant.
        """
        out, weight = inputs.new_query(), inputs.weight
        if _held(weight) != self._held:
            self._read(inputs)
        if self._rows[0] == 0:
            return out
        operands: tuple[Any, ...] = (
            inputs.q, self._weight, weight.scale, inputs.q_scale, out, inputs.positions, inputs.cos_sin_cache,
            inputs.k_pe, inputs.kv_c, inputs.slot_mapping, inputs.k_scale, inputs.kv_cache,
        )  # fmt: skip
        pointers: list[Any] = [None if tensor is None else tensor.data_ptr() for tensor in operands]
        bits = 0
        for k in SPECIALISED:
            bits |= pointers[k]
        aligned = () if bits % 16 == 0 else tuple(pointers[k] % 16 == 0 for k in SPECIALISED)
        seen = (_reach(inputs.kv_cache) < INT32_SPAN, aligned)
        direct = self._compiled.get(seen)
        if direct is not None and direct(self._arguments(pointers)):
            return out
        variant = (self._kind, aligned, *(_reach(operands[k]) < INT32_SPAN for k in SPECIALISED))
        if card().is_capturing() and variant not in _compiled:
            raise backend.KernelCaptureError(
                "triton: a graph is being captured and this variant is not compiled; call warm_up before"
            )
        made = decode_prep_kernel[self._grid](*self._arguments(operands), **self._named)
        _compiled.add(variant)
        self._compiled[seen] = Direct.of(made, self._grid[0], tuple(self._constants.values()))
        return out

    def _arguments(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Return the kernel's run-time arguments; ``operands`` are tensors, or their addresses.

        By position, in the order of the kernel's declaration, because both launchers take a tuple.
        """
        q, w, w_scale, q_scale, out, positions, table, k_pe, kv_c, slot_mapping, k_scale, cache = operands
        tokens, last_position = self._rows
        q_t, q_h, w_h, w_p, w_l, scale_h, scale_l, scale_g, table_t, k_pe_t, kv_c_t, cache_b, cache_s = self._strides
        return (
            tokens, q, w, w_scale, q_scale, q_t, q_h, w_h, w_p, w_l, out, scale_h, scale_l, scale_g, positions, table,
            last_position, table_t, k_pe, kv_c, slot_mapping, k_scale, cache, k_pe_t, kv_c_t, cache_b, cache_s,
        )  # fmt: skip


class Direct:
    """A compiled kernel's own launcher, with all that does not change from call to call."""

    def __init__(self, kernel: Any, programs: int, constants: tuple[Any, ...]) -> None:
        # Here, because another release may have them elsewhere: its kernels keep the dispatch.
        from triton import knobs
        from triton.runtime.driver import driver

        self._driver, self._runtime = driver, knobs.runtime
        self._kernel, self._programs, self._constants = kernel, programs, constants
        self._run, self._handles = kernel.run, (kernel.function, kernel.packed_metadata)
        self._device = driver.active.get_current_device()

    @classmethod
    def of(cls, kernel: Any, programs: int, constants: tuple[Any, ...]) -> "Direct | None":
        """Return the launcher of what a call through Triton's dispatch gave, or None where it is not known.

        Args:
            kernel: what the call returned; the interpreter returns nothing.
            programs: of the grid, which has one dimension.
            constants: the compile-time arguments, which the kernel takes last.
        """
        if ".".join(triton.__version__.split(".")[:2]) not in RELEASES:
            return None
        from triton.compiler import CompiledKernel

        return cls(kernel, programs, constants) if isinstance(kernel, CompiledKernel) else None

    def __call__(self, given: tuple[Any, ...]) -> bool:
        """Launch as Triton's dispatch does in its last step, hooks of profilers included.

        Returns:
            Whether it was launched: False on another device than the kernel was loaded to.
        """
        active, runtime = self._driver.active, self._runtime
        if active.get_current_device() != self._device:
            return False
        stream, arguments = active.get_current_stream(self._device), (*given, *self._constants)
        told = self._kernel.launch_metadata((self._programs,), stream, *arguments)
        hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
        self._run(self._programs, 1, 1, stream, *self._handles, told, *hooks, *arguments)
        return True


_compiled: set[tuple[Any, ...]] = set()
"""The variants that have been launched outside a capture. Of the process, as Triton's cache of loaded kernels is."""


def _reach(tensor: torch.Tensor) -> int:
    """Bytes that offsets from the tensor's address may span: what Triton asks, in its order."""
    told = getattr(tensor, "ptr_range", None)
    return int(told()) if told is not None else tensor.untyped_storage().nbytes()


def _held(weight: AbsorbWeight) -> tuple[Any, ...]:
    """What decides how a weight is addressed."""
    values, scale = weight.values, weight.scale
    key = (values.data_ptr(), values.shape, values.stride(), values.dtype)
    return key if scale is None else (*key, scale.stride())


def _row_stride(tensor: torch.Tensor, dim: int) -> int:
    """Stride of ``dim``. Of a single row it means nothing, and must not be the 1 that Triton specialises on."""
    stride = tensor.stride(dim)
    return tensor.shape[-1] if tensor.shape[dim] == 1 and stride == 1 else stride


def _fp8_max(dtype: torch.dtype) -> float:
    return formats.FLAVOURS[dtype].max if formats.is_fp8(dtype) else 0.0
