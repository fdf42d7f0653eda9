# SPDX-License-Identifier: Apache-2.0
"""What AITER demands of a call on top of the contract that all back ends share.

AITER validates little, and what it validates ends the process (``AITER_CHECK`` calls ``std::abort``), so Python has to
know beforehand. Everything is checked on metadata: shapes, strides, dtypes, devices. No value on the card is read. The
sentences follow csrc/kernels/cache_kernels.cu at the commit named in docs/kernels.md.
"""

from collections.abc import Iterator

import torch

from vllm_aiter_mla.kernels.aiter.route import LATENT, PER_HEAD_TOKENS, ROPE, STRIDE_LIMIT, KernelName, Route
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import VECTOR_BYTES, DecodeInputs, contract_violation
from vllm_aiter_mla.kernels.platform import Platform

ARCHITECTURES = ("gfx942", "gfx950")

LIMITS = {
    "rocm": "before ROCm 7 AITER's bf16 is an integer type and its arithmetic garbage (inferred); use an image with "
    "ROCm 7 or newer",
    "arch": "the op is built and self-checked for gfx942 and gfx950 only; use kernel=triton or kernel=vllm",
    "cache-empty": "AITER divides by the block size and writes without looking; wait until the cache is allocated",
    "widths": "the fast kernels are written for 512 + 64; use kernel=triton or kernel=vllm",
    "table": "AITER clamps positions into the table; pass at least one row",
    "activation-dtype": "AITER knows bf16 and fp16, and in fp32 its products round as nothing else does; cast the "
    "model and its rotary table",
    "absorb": "AITER's batched GEMM reads the weight as the card's own type, in whole blocks; "
    "VLLM_ROCM_USE_AITER_FP4BMM=0 leaves fp8, VLLM_ROCM_USE_AITER_FP8BMM=0 as well 16 bits; W_UV changes too",
    "cache-dtype": "another fp8 flavour ends in an abort or an assertion; use the activation dtype or the card's fp8 "
    "(e4m3) for the KV cache",
    "last-stride": "AITER takes the last stride for 1, or aborts; make the rows dense",
    "int-strides": "AITER keeps strides in 32 bits: they would wrap; keep rows less than 2^31 elements apart",
    "index-stride": "AITER reads slots and positions densely; make them contiguous",
    "devices": "AITER launches on the current device's stream and reads any pointer; keep all operands on the current "
    "device",
    "alignment": "kv_c and the cache are accessed by vectors, unaligned rows are untried (inferred); align the rows to "
    "16 bytes (kv_c) and 4 bytes (cache)",
}
"""By the name of each limit: what AITER does beyond it, and what the user or the caller can do."""


def violation(inputs: DecodeInputs, platform: Platform) -> str | None:
    """Return the first broken limit as a sentence, or None: the shared contract's, then AITER's. Metadata only."""
    if (broken := contract_violation(inputs)) is not None:
        return broken
    name, found = next(_broken(inputs, platform), ("", ""))
    return f"{name}: {found}; {LIMITS[name]}" if name else None


def _broken(inputs: DecodeInputs, platform: Platform) -> Iterator[tuple[str, str]]:
    """(limit, what is wrong) for operands that keep the shared contract; each check may rely on those before it."""
    act, cache = inputs.q.dtype, inputs.kv_cache
    if platform.rocm is None or platform.rocm[0] < 7:
        yield "rocm", "ROCm {}.{}".format(*platform.rocm) if platform.rocm else "torch is not built for ROCm"
    if platform.arch not in ARCHITECTURES:
        yield "arch", f"this card is {platform.arch}"
    if not cache.numel():
        yield "cache-empty", f"the cache is empty, {list(cache.shape)}"
    if (inputs.latent_dim, inputs.rope_dim) != (LATENT, ROPE):
        yield "widths", f"kv_lora_rank {inputs.latent_dim} and rope width {inputs.rope_dim}"
    if not inputs.cos_sin_cache.shape[0]:
        yield "table", "cos_sin_cache has no row"
    if act not in (torch.bfloat16, torch.float16):
        yield "activation-dtype", f"the activations are {act}"
    if (found := inputs.weight.refuse(platform)) is not None:
        yield "absorb", found
    if cache.dtype not in (platform.fp8, act):
        yield "cache-dtype", f"the cache is {cache.dtype}"
    yield from _broken_layout(inputs)


def _broken_layout(inputs: DecodeInputs) -> Iterator[tuple[str, str]]:
    rows = {name: getattr(inputs, name) for name in ("q", "kv_c", "k_pe", "kv_cache")}
    for name, tensor in rows.items():
        if tensor.stride(-1) != 1:
            yield "last-stride", f"{name} has last stride {tensor.stride(-1)}"
    for name, tensor in rows.items():
        if max(tensor.stride()) >= STRIDE_LIMIT:
            yield "int-strides", f"{name} has strides {tensor.stride()}"
    for name in ("slot_mapping", "positions"):
        if not (tensor := getattr(inputs, name)).is_contiguous():
            yield "index-stride", f"{name} has stride {tensor.stride(0)}"
    home = inputs.kv_cache.device
    if home.type == card().torch_device and home != (current := card().current()):
        yield "devices", f"the cache is on {home}, the current device is {current}"
    for name, tensor in inputs.tensors:
        if tensor.device != home:
            yield "devices", f"{name} is on {tensor.device}, the cache on {home}"
    kv_c, cache = inputs.kv_c, inputs.kv_cache
    if any(n * kv_c.itemsize % VECTOR_BYTES for n in (kv_c.storage_offset(), kv_c.stride(0))):
        yield "alignment", f"kv_c rows start at {kv_c.storage_offset()} with stride {kv_c.stride(0)}"
    if any(n * cache.itemsize % 4 for n in (cache.storage_offset(), cache.stride(0), cache.stride(1))):
        yield "alignment", f"cache rows start at {cache.storage_offset()} with strides {cache.stride()}"


def kernel_violation(route: Route, wanted: KernelName, heads: int, tokens: int) -> str | None:
    """Return why the kernel of ``route`` must not run, or None: known only after the checks above have passed."""
    if not route.honours_all_rows:
        return (
            f"kernel: {heads} heads and {tokens} tokens land on AITER's general kernel; it aborts on "
            "compute_all_q_rope, does not clamp positions and leaves padded rows unwritten; use at least 4 heads per "
            "rank (a lower tensor-parallel size), or below 256 tokens a contiguous cache"
        )
    if route.kernel != wanted:
        other = "aiter" if wanted == "opt" else "aiter-opt"
        return f"kernel: no view of this cache leads to AITER's {wanted} kernel; kernel={other} runs the other"
    if route.numerics.truncate_cache_rope and tokens < PER_HEAD_TOKENS:
        return "kernel: AITER's opt kernel cuts the rope part of a bf16 cache toward zero here; kernel=aiter rounds it"
    return None
