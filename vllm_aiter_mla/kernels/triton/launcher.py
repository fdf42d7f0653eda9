"""From ``DecodeInputs`` to one launch of the kernel, and compilation ahead of graph capture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from vllm_aiter_mla.kernels import backend, formats
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.kernels.platform import detect_platform
from vllm_aiter_mla.kernels.triton import interpreted
from vllm_aiter_mla.kernels.triton.kernel import decode_prep_kernel
from vllm_aiter_mla.kernels.triton.tiles import FP_FUSION, Entry, Tile, entry_for


@lru_cache(maxsize=1)
def current_arch() -> str:
    """Return the architecture of the current GPU: gfx942, gfx950, sm90, ..., or "interpreter"."""
    return "interpreter" if interpreted() else detect_platform().arch


def program_count(tokens: int, heads: int, slots: int, latent: int, tile: Tile) -> int:
    """Return the size of the one-dimensional grid; the kernel's docstring says what the programs are."""
    query = heads * _ceil(tokens, tile.block_t) * (latent // min(tile.block_l, latent))
    rope = _ceil(tokens * heads, tile.rope_rows)
    return query + rope + _ceil(slots, tile.rope_rows) + _ceil(slots, tile.kv_rows)


def constants(inputs: DecodeInputs, tile: Tile) -> dict[str, Any]:
    """Return the kernel's compile-time arguments for these operands. Metadata only."""
    return {
        "N": inputs.num_heads,
        "P": inputs.nope_dim,
        "R": inputs.rope_dim,
        "L": inputs.latent_dim,
        "BLOCK_SIZE": inputs.kv_cache.shape[1],
        "IS_NEOX": inputs.is_neox,
        "Q_FP8_MAX": _fp8_max(inputs.out_dtype),
        "KV_FP8_MAX": _fp8_max(inputs.kv_cache.dtype),
        "W_FP8_MAX": _fp8_max(inputs.weight.values.dtype),
        "BLOCK_T": tile.block_t,
        "BLOCK_L": min(tile.block_l, inputs.latent_dim),
        "ROPE_ROWS": tile.rope_rows,
        "KV_ROWS": tile.kv_rows,
    }


def strides(inputs: DecodeInputs) -> tuple[int, ...]:
    """Return the kernel's stride arguments in its order, in elements; zeros for scales that it does not step over."""
    q, cache, scale = inputs.q, inputs.kv_cache, inputs.weight.scale
    w = inputs.weight.as_npl
    return (
        _row_stride(q, 0),
        _row_stride(q, 1),
        _row_stride(inputs.k_pe, 0),
        _row_stride(inputs.kv_c, 0),
        _row_stride(w, 0),
        w.stride(1),
        w.stride(2),
        *(scale.stride() if scale is not None and inputs.weight.format == "mxfp4" else (0, 0, 0)),
        _row_stride(inputs.cos_sin_cache, 0),
        _row_stride(cache, 0),
        _row_stride(cache, 1),
    )


def launch(inputs: DecodeInputs, tile: Tile) -> torch.Tensor:
    """Run the kernel once on the current stream. The caller has checked the operands.

    Returns:
        q_prepared [T, N, L+R] of ``inputs.out_dtype``, contiguous: the only allocation.

    Raises:
        KernelCaptureError: a graph is being captured and this variant has not been compiled: see ``warm_up``.
    """
    tokens, heads, out = inputs.num_tokens, inputs.num_heads, inputs.new_query()
    if tokens == 0:
        return out
    slots = inputs.slot_mapping.shape[0] if inputs.kv_cache.numel() else 0
    compile_time = constants(inputs, tile)
    tensors = (inputs.q, inputs.k_pe, inputs.kv_c, inputs.weight.as_npl, inputs.kv_cache, out)
    steps = strides(inputs)
    _require_compiled(_variant(tensors, steps, compile_time, tile))
    options: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": 1, "enable_fp_fusion": FP_FUSION}
    if torch.version.hip is not None:
        options["matrix_instr_nonkdim"] = tile.mfma
    grid = (program_count(tokens, heads, slots, inputs.latent_dim, tile),)
    decode_prep_kernel[grid](
        *tensors,
        inputs.slot_mapping,
        inputs.positions,
        inputs.cos_sin_cache,
        inputs.k_scale,
        inputs.q_scale,
        inputs.weight.scale,
        tokens,
        slots,
        inputs.cos_sin_cache.shape[0] - 1,
        *steps,
        **compile_time,
        **options,
    )
    return out


def entry(inputs: DecodeInputs, tokens: int | None = None) -> Entry:
    """Return the table's entry for these operands, or for ``tokens`` rows of the same layer."""
    return entry_for(current_arch(), inputs.num_tokens if tokens is None else tokens, inputs.num_heads)


def warm_up(template: DecodeInputs, token_counts: Iterable[int]) -> tuple[Tile, ...]:
    """Compile and load every variant that captures of ``token_counts`` rows need. Call it outside capture.

    One launch per distinct tile, on the first row of ``template`` with no slot: it reads one row, writes a fresh query
    and no byte of the cache. One row is enough because T, S and the table's length are not specialised on. What
    decides a variant is the tile, the dtypes, the strides' and pointers' alignment and the constants of the layer:
    the row shares them with every batch of its layer.

    Args:
        template: operands of the layer with the strides they will have, at least one row.
        token_counts: the T of every graph that will be captured; 0 needs nothing.

    Returns:
        The distinct tiles, in the order of the first T that needs each.

    Raises:
        ValueError: ``template`` has no row.
    """
    if template.num_tokens == 0:
        raise ValueError("warm_up: a template with at least one row expected, got none")
    one = replace(
        template,
        q=template.q[:1],
        k_pe=template.k_pe[:1],
        kv_c=template.kv_c[:1],
        positions=template.positions[:1],
        slot_mapping=template.slot_mapping[:0],
    )
    tiles = tuple(dict.fromkeys(entry(template, count).tile for count in token_counts if count > 0))
    for tile in tiles:
        launch(one, tile)
    return tiles


_compiled: set[tuple[Any, ...]] = set()


def _variant(
    tensors: tuple[torch.Tensor, ...], steps: tuple[int, ...], compile_time: dict[str, Any], tile: Tile
) -> tuple[Any, ...]:
    """What Triton specialises on: dtypes, 16-byte alignment, the 2 GiB hint, and each stride's class."""
    pointers = tuple((t.dtype, t.data_ptr() % 16 == 0, t.untyped_storage().nbytes() < 2**31) for t in tensors)
    classes = tuple((s == 1, s % 16 == 0, s < 2**31) for s in steps)
    return (tensors[0].device, tile, pointers, classes, tuple(compile_time.values()))


def _require_compiled(variant: tuple[Any, ...]) -> None:
    """Note a variant that is about to be compiled, unless a capture is under way, which must not compile."""
    if variant in _compiled:
        return
    if backend.is_capturing():
        raise backend.KernelCaptureError(
            "triton: a graph is being captured and this variant is not compiled; call warm_up before"
        )
    _compiled.add(variant)


def _row_stride(tensor: torch.Tensor, dim: int) -> int:
    """Stride of ``dim``. Of a single row it means nothing, and must not be the 1 that Triton specialises on."""
    stride = tensor.stride(dim)
    return tensor.shape[-1] if tensor.shape[dim] == 1 and stride == 1 else stride


def _fp8_max(dtype: torch.dtype) -> float:
    return formats.flavour_of(dtype).max if formats.is_fp8(dtype) else 0.0


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
