"""Everything a call must satisfy before AITER may see it.

AITER validates little, and what it validates ends the process (``AITER_CHECK`` calls ``std::abort``), so Python has to
know beforehand. Each precondition is a :class:`Check` over metadata: shapes, strides, dtypes, devices; no value on
the card is read. The wording of ``why`` follows csrc/kernels/cache_kernels.cu at the commit named in docs/aiter.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from vllm_aiter_mla.kernels.aiter.dispatch import LATENT, ROPE, STRIDE_LIMIT, Route
from vllm_aiter_mla.kernels.inputs import VECTOR_BYTES, DecodeInputs
from vllm_aiter_mla.kernels.platform import Platform

ACTIVATIONS = (torch.bfloat16, torch.float16)
ARCHITECTURES = ("gfx942", "gfx950")
SPAN_LIMIT = 1 << 32  # bytes one buffer descriptor reaches: opus.hpp, make_gmem(ptr, unsigned size)
Finding = Callable[[DecodeInputs, Platform], "str | None"]


@dataclass(frozen=True, slots=True)
class Check:
    """One precondition.

    Attributes:
        name: what a report calls it.
        why: what AITER does where it is broken.
        remedy: what the user or the caller can do.
        find: what is wrong with these operands on this platform, or None.
    """

    name: str
    why: str
    remedy: str
    find: Finding

    def reason(self, inputs: DecodeInputs, platform: Platform) -> str | None:
        """The sentence for a skip, or None where the precondition holds."""
        found = self.find(inputs, platform)
        return None if found is None else f"{self.name}: {found}; {self.why}; {self.remedy}"


def _rocm(inputs: DecodeInputs, platform: Platform) -> str | None:
    if platform.rocm is None:
        return "torch is not built for ROCm"
    return None if platform.rocm[0] >= 7 else f"ROCm {platform.rocm[0]}.{platform.rocm[1]}"


def _arch(inputs: DecodeInputs, platform: Platform) -> str | None:
    return None if platform.arch in ARCHITECTURES else f"this card is {platform.arch}"


def _ranks(inputs: DecodeInputs, platform: Platform) -> str | None:
    expected = {"q": 3, "k_pe": 2, "kv_c": 2, "cos_sin_cache": 2, "slot_mapping": 1, "positions": 1, "W_UK": 3}
    given = {name: tensor.dim() for name, tensor in inputs.tensors} | {"W_UK": len(inputs.weight.sizes)}
    return _first(f"{name} has {given[name]} dimensions, not {n}" for name, n in expected.items() if given[name] != n)


def _cache_rank(inputs: DecodeInputs, platform: Platform) -> str | None:
    shape = list(inputs.kv_cache.shape)
    return None if len(shape) == 3 else f"the cache is {len(shape)}-D, {shape}"


def _cache_empty(inputs: DecodeInputs, platform: Platform) -> str | None:
    return None if inputs.kv_cache.numel() else f"the cache is empty, {list(inputs.kv_cache.shape)}"


def _widths(inputs: DecodeInputs, platform: Platform) -> str | None:
    widths = (inputs.latent_dim, inputs.rope_dim)
    if widths != (LATENT, ROPE):
        return f"kv_lora_rank {widths[0]} and rope width {widths[1]}"
    return None if inputs.nope_dim > 0 else f"a query head of {inputs.q.shape[2]} is no wider than its rope part"


def _shapes(inputs: DecodeInputs, platform: Platform) -> str | None:
    t, n, p = inputs.num_tokens, inputs.num_heads, inputs.nope_dim
    expected = {"k_pe": (t, ROPE), "kv_c": (t, LATENT), "W_UK": (n, p, LATENT)}
    given = {"k_pe": tuple(inputs.k_pe.shape), "kv_c": tuple(inputs.kv_c.shape), "W_UK": inputs.weight.sizes}
    return _first(f"{name} is {given[name]}, not {want}" for name, want in expected.items() if given[name] != want)


def _cache_width(inputs: DecodeInputs, platform: Platform) -> str | None:
    width = inputs.kv_cache.shape[2]
    return None if width == LATENT + ROPE else f"a cache row has {width} elements"


def _table(inputs: DecodeInputs, platform: Platform) -> str | None:
    rows, width = inputs.cos_sin_cache.shape
    return None if rows and width == ROPE else f"cos_sin_cache is [{rows}, {width}]"


def _activation(inputs: DecodeInputs, platform: Platform) -> str | None:
    act = inputs.kv_c.dtype
    if act not in ACTIVATIONS:
        return f"kv_c is {act}"
    others = _named(inputs, "q", "k_pe", "cos_sin_cache")
    return _first(f"{name} is {tensor.dtype} beside {act}" for name, tensor in others if tensor.dtype != act)


def _absorb(inputs: DecodeInputs, platform: Platform) -> str | None:
    return inputs.weight.broken(inputs.kv_c.dtype) or inputs.weight.refuse(platform)


def _cache_bytes(inputs: DecodeInputs, platform: Platform) -> str | None:
    return "the cache is torch.uint8" if inputs.kv_cache.dtype == torch.uint8 else None


def _cache_dtype(inputs: DecodeInputs, platform: Platform) -> str | None:
    dtype = inputs.kv_cache.dtype
    return None if dtype in (platform.fp8, inputs.kv_c.dtype) else f"the cache is {dtype}"


def _out_dtype(inputs: DecodeInputs, platform: Platform) -> str | None:
    allowed = (inputs.kv_c.dtype, inputs.kv_cache.dtype)
    return None if inputs.out_dtype in allowed else f"a {inputs.out_dtype} query beside a {inputs.kv_cache.dtype} cache"


def _dense(name: str) -> Finding:
    """The check that the last dimension of the operand ``name`` has stride 1."""

    def find(inputs: DecodeInputs, platform: Platform) -> str | None:
        ((_, tensor),) = _named(inputs, name)
        return None if tensor.stride(-1) == 1 else f"its last stride is {tensor.stride(-1)}"

    return find


def _int_strides(inputs: DecodeInputs, platform: Platform) -> str | None:
    operands = _named(inputs, "q", "k_pe", "kv_c", "kv_cache")
    return _first(f"{name} has strides {t.stride()}" for name, t in operands if max(t.stride()) >= STRIDE_LIMIT)


def _index_dtype(inputs: DecodeInputs, platform: Platform) -> str | None:
    indices = _named(inputs, "slot_mapping", "positions")
    return _first(f"{name} is {tensor.dtype}" for name, tensor in indices if tensor.dtype != torch.int64)


def _index_stride(inputs: DecodeInputs, platform: Platform) -> str | None:
    indices = _named(inputs, "slot_mapping", "positions")
    return _first(f"{name} has stride {tensor.stride(0)}" for name, tensor in indices if not tensor.is_contiguous())


def _lengths(inputs: DecodeInputs, platform: Platform) -> str | None:
    slots, rows, positions = inputs.slot_mapping.shape[0], inputs.num_tokens, inputs.positions.shape[0]
    if slots > rows:
        return f"{slots} slots but {rows} rows of q"
    return None if positions == rows else f"{positions} positions beside {rows} rows of q"


def _scales(inputs: DecodeInputs, platform: Platform) -> str | None:
    for name, scale in _named(inputs, "k_scale", "q_scale"):
        if scale.dtype != torch.float32 or scale.numel() < 1:
            return f"{name} is {scale.numel()} element(s) of {scale.dtype}"
    return None


def _devices(inputs: DecodeInputs, platform: Platform) -> str | None:
    home = inputs.kv_cache.device
    if home.type == "cuda" and home.index != torch.cuda.current_device():
        return f"the cache is on {home}, the current device is cuda:{torch.cuda.current_device()}"
    others = (f"{name} is on {tensor.device}" for name, tensor in inputs.tensors if tensor.device != home)
    return _first(f"{other}, the cache on {home}" for other in others)


def _alignment(inputs: DecodeInputs, platform: Platform) -> str | None:
    act, cache = inputs.kv_c, inputs.kv_cache
    if (act.storage_offset() * act.itemsize) % VECTOR_BYTES or (act.stride(0) * act.itemsize) % VECTOR_BYTES:
        return f"kv_c rows start at {act.storage_offset()} with stride {act.stride(0)}"
    if any((n * cache.itemsize) % 4 for n in (cache.storage_offset(), cache.stride(0), cache.stride(1))):
        return f"cache rows start at {cache.storage_offset()} with strides {cache.stride()}"
    return None


def _named(inputs: DecodeInputs, *names: str) -> list[tuple[str, torch.Tensor]]:
    return [(name, getattr(inputs, name)) for name in names]


def _first(findings: Iterable[str]) -> str | None:
    return next(iter(findings), None)


# In this order: a check may rely on those before it.
CHECKS = (
    Check("rocm", "before ROCm 7 AITER's bf16 is an integer type and its arithmetic garbage (inferred)",
          "use an image with ROCm 7 or newer", _rocm),
    Check("arch", "the op is built and self-checked for gfx942 and gfx950 only",
          "use kernel=triton or kernel=vllm", _arch),
    Check("ranks", "AITER aborts on a 3-D k_pe or kv_c and on q of another rank, and misreads the rest",
          "pass q and W_UK 3-D, the others 2-D, indices 1-D", _ranks),
    Check("cache-rank", "AITER takes size(1) for the block size: a 4-D [blocks, 1, block, 576] is read as block size 1",
          "pass [blocks, block_size, 576]", _cache_rank),
    Check("cache-empty", "AITER divides by the block size and writes without looking",
          "wait until the cache is allocated", _cache_empty),
    Check("widths", "the fast kernels are written for 512 + 64", "use kernel=triton or kernel=vllm", _widths),
    Check("shapes", "AITER reads rows by the slots' number and heads by q's, unchecked",
          "pass one row per token", _shapes),
    Check("cache-width", "the last dimension is not checked: rows would overlap", "pass rows of 576", _cache_width),
    Check("table", "the rotary width decides the kernel", "pass cos beside sin, 32 + 32", _table),
    Check("activation-dtype", "AITER reads all of them as kv_c's type, and aborts on an unknown one",
          "cast the model and its rotary table to bf16 or fp16; in fp32 its products round as nothing else does",
          _activation),
    Check("absorb", "AITER's batched GEMM reads the weight as the card's own type, in whole blocks",
          "VLLM_ROCM_USE_AITER_FP4BMM=0 leaves fp8, VLLM_ROCM_USE_AITER_FP8BMM=0 as well 16 bits; W_UV changes too",
          _absorb),
    Check("cache-uint8", "AITER aborts on uint8: 'kv cache data type is not supported'",
          "view it as the card's fp8 type", _cache_bytes),
    Check("cache-dtype", "another fp8 flavour or integer type ends in an abort or an assertion, another float type is"
          " silently written as kv_c's", "use the activation dtype or fp8 (e4m3) for the KV cache", _cache_dtype),
    Check("out-dtype", "AITER aborts on an fp8 query beside a float cache and writes other float types as kv_c's",
          "ask for the activation dtype or the cache's fp8 type", _out_dtype),
    Check("q-stride", "the last stride is taken for 1", "make q contiguous in its last dimension", _dense("q")),
    Check("kv_c-stride", "AITER aborts", "make kv_c contiguous in its last dimension", _dense("kv_c")),
    Check("k_pe-stride", "AITER aborts", "make k_pe contiguous in its last dimension", _dense("k_pe")),
    Check("cache-stride", "the last stride is taken for 1", "use a layout with dense rows", _dense("kv_cache")),
    Check("int-strides", "AITER keeps strides in 32 bits: they would wrap", "keep rows less than 2^31 elements apart",
          _int_strides),
    Check("index-dtype", "AITER reads the bytes as int64 whatever they are", "cast to torch.int64", _index_dtype),
    Check("index-stride", "AITER reads them densely", "make it contiguous", _index_stride),
    Check("lengths", "AITER takes the number of rows from the slots and reads past the end",
          "pass one position and at most one slot per row", _lengths),
    Check("scales", "AITER reads the first four bytes as fp32", "pass one fp32 element on the device", _scales),
    Check("devices", "AITER launches on the current device's stream and reads any pointer",
          "keep all operands on the current device", _devices),
    Check("alignment", "kv_c and the cache are accessed by vectors; unaligned rows are untried (inferred)",
          "align the rows to 16 bytes (kv_c) and 4 bytes (cache)", _alignment),
)  # fmt: skip


def violation(inputs: DecodeInputs, platform: Platform) -> str | None:
    """The first broken precondition as a sentence, or None. Metadata only."""
    return _first(reason for check in CHECKS if (reason := check.reason(inputs, platform)) is not None)


def kernel_violation(route: Route, heads: int, tokens: int) -> str | None:
    """Why the kernel of ``route`` must not run, or None: known only after the checks above have passed."""
    if route.honours_all_rows:
        return None
    return (
        f"kernel: {heads} heads and {tokens} tokens land on AITER's general kernel; it aborts on compute_all_q_rope, "
        "does not clamp positions and leaves padded rows unwritten; use at least 4 heads per rank (a lower "
        "tensor-parallel size), or below 256 tokens a contiguous cache and another aiter_view than as-is"
    )


def span_violation(q_nope: torch.Tensor) -> str | None:
    """Why AITER must not be given this absorbed query [T, N, 512], or None.

    The opt kernel addresses one token's heads through one 32-bit buffer descriptor.
    """
    if q_nope.stride(2) != 1:
        return f"q_nope: its last stride is {q_nope.stride(2)}; AITER takes it for 1; make it contiguous"
    span = ((q_nope.shape[1] - 1) * q_nope.stride(1) + q_nope.shape[2]) * q_nope.itemsize
    if span < SPAN_LIMIT:
        return None
    return f"q_nope: one token spans {span} bytes, over 4 GiB; AITER would drop the heads beyond; make it contiguous"
