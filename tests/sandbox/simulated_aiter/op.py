"""The entry of the simulated op: AITER's host-side checks, then its choice of kernel, in AITER's order.

Source: ``fused_qk_rope_concat_and_cache_mla`` in csrc/kernels/cache_kernels.cu, ``_aiter_dtype_id`` in
aiter/utility/dtypes.py and ``torch_compile_guard`` in aiter/jit/utils/torch_guard.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch

from tests.sandbox.simulated_aiter import execute
from tests.sandbox.simulated_aiter.memory import abort

FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint32, torch.int32, torch.int16, torch.int8, torch.uint8, torch.int64, torch.uint64)
NAME = "fused_qk_rope_concat_and_cache_mla"

# What a test wants to know about the calls so far: the kernel and the rows, in order.
launches: list[tuple[str, int]] = []
_pending_error: list[str] = []
_libraries: list[torch.library.Library] = []


def arch() -> str:
    """Return the card that is simulated (rocminfo's job); set by ``install``."""
    return os.environ.get("SIMULATED_AITER_ARCH", "gfx942")


def register(source: Callable[..., None]) -> Callable[..., None]:
    """Register the op under AITER's name with the schema of ``source``, every tensor mutable, as AITER does."""
    if not hasattr(torch.ops.aiter, NAME):
        library = torch.library.Library("aiter", "FRAGMENT")
        schema = torch.library.infer_schema(source, mutates_args="unknown")
        library.define(f"{NAME}{schema}")
        library.impl(NAME, call, "CPU")
        _libraries.append(library)
    return getattr(torch.ops.aiter, NAME)


def call(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    q_out: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    q_scale: torch.Tensor,
    positions: torch.Tensor,
    cos_cache: torch.Tensor,
    sin_cache: torch.Tensor,
    is_neox: bool,
    is_nope_first: bool,
    compute_all_q_rope: bool = False,
) -> None:
    """One call of the op; see ``vllm_aiter_mla.kernels.aiter.backend.launch`` for the shapes."""
    tensors = (q_nope, q_pe, kv_c, k_pe, kv_cache, q_out, slot_mapping, k_scale, q_scale, positions)
    for tensor in (*tensors, cos_cache, sin_cache):
        _convert(tensor)
    _check_shapes(q_nope, q_pe, kv_c, k_pe, kv_cache, q_out)
    _check_dtypes(kv_c, kv_cache, q_out)
    if kv_c.stride(-1) != 1 or k_pe.stride(-1) != 1:
        abort("kv_c and k_pe stride(-1) must be equal to 1")
    tokens, heads = slot_mapping.shape[0], q_nope.shape[1]
    kernel = _dispatch(kv_c, k_pe, _size(kv_cache, 1), heads, tokens, cos_cache.shape[-1] * 2, is_nope_first)
    if compute_all_q_rope and kernel not in ("per-head", "opt"):
        abort(f"compute_all_q_rope is not supported by the {kernel} kernel")
    if kv_c.dtype not in FLOATS:
        abort("Unsupported input type of kv cache")
    if not is_nope_first:
        raise NotImplementedError("only vLLM's layout is simulated: nope first")
    launches.append((kernel, tokens))
    _launch_guard(tokens)
    execute.run(
        execute.Call(
            *tensors, cos_cache, sin_cache, is_neox=is_neox, all_rows=compute_all_q_rope, kernel=kernel, arch=arch()
        )
    )


def _convert(tensor: torch.Tensor) -> None:
    # The one check that is an exception: the Python side does not know the dtype.
    known = (*FLOATS, *INTEGERS, FP8[arch()], torch.float8_e8m0fnu)
    assert tensor.dtype in known, f"Unsupported dtype: {tensor.dtype}"


def _size(tensor: torch.Tensor, dim: int) -> int:
    # aiter_tensor_t::size reads its eight slots unchecked; those past the rank hold zero or rubbish.
    return tensor.shape[dim] if tensor.dim() > dim else 0


def _check_shapes(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    q_out: torch.Tensor,
) -> None:
    if _size(kv_cache, 1) == 0:
        signal.raise_signal(signal.SIGFPE)  # blocks = (tokens + block_size - 1) / block_size
    if q_nope.dim() != q_pe.dim() or q_nope.shape[1] != q_pe.shape[1]:
        abort("check failed: q_nope and q_pe")
    if _size(q_out, 2) != q_nope.shape[-1] + k_pe.shape[-1]:
        abort("check failed: q_out.size(2) == qk_lora_rank + pe_dim")
    if kv_c.shape[-1] != q_nope.shape[-1]:
        abort("kv_lora_rank and qk_lora_rank must be the same")


def _check_dtypes(kv_c: torch.Tensor, kv_cache: torch.Tensor, q_out: torch.Tensor) -> None:
    fp8 = FP8[arch()]
    for tensor in (kv_cache, q_out):
        if tensor.dtype not in (*FLOATS, fp8):
            abort("kv cache data type is not supported")
    if kv_cache.dtype in FLOATS and q_out.dtype == fp8:
        abort("kv cache data type is auto and q_out data type is fp8, which is not supported")


def _dispatch(
    kv_c: torch.Tensor, k_pe: torch.Tensor, block: int, heads: int, tokens: int, rope: int, nope_first: bool
) -> str:
    lora = kv_c.shape[-1]
    if kv_c.dim() == 3 and k_pe.dim() == 3 and kv_c.shape[1] > 1:
        return "prefill"
    single = kv_c.dim() == 3 and k_pe.dim() == 3
    if not single and not (kv_c.dim() == 2 and k_pe.dim() == 2):
        abort(f"Unsupported tensor dimensions: kv_c.dim()={kv_c.dim()}, k_pe.dim()={k_pe.dim()}")
    if nope_first and lora <= 512 and block == 1 and rope == 64 and tokens < 256:
        return "per-head"
    if rope == 64 and lora * heads >= 2048 and lora == 512:
        return "opt"
    return "general"


def _launch_guard(tokens: int) -> None:
    # HIP reports a launch error at the next call, not at the launch.
    if _pending_error:
        raise RuntimeError(_pending_error.pop())
    if tokens == 0:
        _pending_error.append("HIP error: invalid configuration argument")


def forget() -> list[tuple[str, int]]:
    """Return the launches so far and start afresh; clears a pending launch error too."""
    seen: list[Any] = list(launches)
    launches.clear()
    _pending_error.clear()
    return seen
