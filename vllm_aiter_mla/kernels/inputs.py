"""What every kernel back end is given for one layer and one step, what all demand of it, and the keys of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_aiter_mla.kernels import fp8
from vllm_aiter_mla.kernels.absorb.form import AbsorbWeight

VECTOR_BYTES = 16  # of the widest memory access; where a tensor starts within it is part of a call's key


class KernelInputError(ValueError):
    """A tensor handed to a kernel breaks the shared contract; the message names the tensor and the value."""


@dataclass(slots=True)  # not frozen: one is made per layer and step, and a frozen one takes five times as long
class DecodeInputs:
    """The operands of the decode-side preparation of one MLA layer.

    Sizes: T rows (graph padding included), S <= T slots, N heads of this rank, P nope width of a query head,
    R rope width, L latent width (``kv_lora_rank``). "act" is the activation dtype (bfloat16, float16 or float32).

    Attributes:
        q: [T, N, P+R] act, not rotated; any row and head stride, last stride 1.
        k_pe: [T, R] act, not rotated; any row stride.
        kv_c: [T, L] act, after its norm; any row stride.
        weight: the absorbed up-projection W_UK in the form in which vLLM holds it.
        kv_cache: [blocks, block_size, L+R] act or the platform's fp8 type (never raw uint8). Written in place.
        slot_mapping: [S] int64; block * block_size + offset, or -1 for a row without a KV row.
        positions: [T] int64; clamped into the table as AITER does.
        cos_sin_cache: [max_position, R] act; cos in the first half of a row, sin in the second.
        k_scale: one float32, dequantisation scale of the cache: stored = fp8(x / k_scale).
        q_scale: one float32, dequantisation scale of the query.
        is_neox: True pairs (i, i + R/2), False (GPT-J, DeepSeek) pairs (2i, 2i+1).
        out_dtype: dtype of the prepared query: act, or fp8 where the cache is fp8.
    """

    q: torch.Tensor
    k_pe: torch.Tensor
    kv_c: torch.Tensor
    weight: AbsorbWeight
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    k_scale: torch.Tensor
    q_scale: torch.Tensor
    is_neox: bool
    out_dtype: torch.dtype

    @property
    def num_tokens(self) -> int:
        """T, rows of q including graph padding."""
        return self.q.shape[0]

    @property
    def num_heads(self) -> int:
        """N, query heads on this rank."""
        return self.q.shape[1]

    @property
    def rope_dim(self) -> int:
        """R, width of the rotated part."""
        return self.k_pe.shape[-1]

    @property
    def latent_dim(self) -> int:
        """L, ``kv_lora_rank``."""
        return self.kv_c.shape[-1]

    @property
    def nope_dim(self) -> int:
        """P, width of a query head's un-rotated part."""
        return self.q.shape[2] - self.rope_dim

    @property
    def q_nope(self) -> torch.Tensor:
        """[T, N, P], the query's un-rotated part; a view."""
        return self.q[..., : self.nope_dim]

    @property
    def tensors(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """(name, tensor) of every operand, the weight's included."""
        return (
            ("q", self.q), ("k_pe", self.k_pe), ("kv_c", self.kv_c), ("kv_cache", self.kv_cache),
            ("slot_mapping", self.slot_mapping), ("positions", self.positions), ("cos_sin_cache", self.cos_sin_cache),
            ("k_scale", self.k_scale), ("q_scale", self.q_scale), *self.weight.tensors,
        )  # fmt: skip

    def new_query(self) -> torch.Tensor:
        """[T, N, L+R] of ``out_dtype``, contiguous and uninitialised."""
        tokens, heads, _ = self.q.shape
        return self.q.new_empty((tokens, heads, self.kv_cache.shape[-1]), dtype=self.out_dtype)


def call_key(inputs: DecodeInputs) -> tuple[Any, ...]:
    """What a choice of kernel depends on: equal keys are treated alike. Metadata only, once per eager call."""
    return (
        inputs.is_neox,
        inputs.out_dtype,
        inputs.weight.form,
        *[
            (t.shape, t.stride(), t.dtype, t.device, t.storage_offset() * t.itemsize % VECTOR_BYTES)
            for _, t in inputs.tensors
        ],
    )


def layer_key(inputs: DecodeInputs) -> tuple[Any, ...]:
    """What makes a layer shape: the call key without tokens, strides and the cache's block size.

    The block size is left out because a self-check on synthetic blocks must hold for the real ones.
    """
    return (
        inputs.num_heads, inputs.nope_dim, inputs.rope_dim, inputs.latent_dim, inputs.q.dtype, inputs.kv_cache.dtype,
        inputs.out_dtype, inputs.is_neox, inputs.kv_cache.device, inputs.weight.key,
    )  # fmt: skip


def check_shapes(inputs: DecodeInputs) -> None:
    """Check what every back end relies on, from metadata alone (no device synchronisation).

    Raises:
        KernelInputError: names the tensor, what is expected and what was given.
    """
    t, n, p, r, lat = inputs.num_tokens, inputs.num_heads, inputs.nope_dim, inputs.rope_dim, inputs.latent_dim
    if p <= 0 or r <= 0 or r % 2:
        raise KernelInputError(f"q: [T, N, P+R] with P > 0 and an even R expected, got {tuple(inputs.q.shape)}, R={r}")
    _expect("k_pe", inputs.k_pe, (t, r))
    _expect("kv_c", inputs.kv_c, (t, lat))
    if inputs.weight.sizes != (n, p, lat):
        name, wanted = inputs.weight.tensors[0][0], [n, p, lat]
        raise KernelInputError(f"{name}: N, P and L of {wanted} expected, got {list(inputs.weight.sizes)}")
    _expect("positions", inputs.positions, (t,))
    if inputs.kv_cache.dim() != 3 or inputs.kv_cache.shape[2] != lat + r:
        raise KernelInputError(
            f"kv_cache: [blocks, block_size, {lat + r}] expected, got {tuple(inputs.kv_cache.shape)}"
        )
    if inputs.slot_mapping.dim() != 1 or inputs.slot_mapping.shape[0] > t:
        raise KernelInputError(f"slot_mapping: at most {t} slots expected, got {tuple(inputs.slot_mapping.shape)}")
    if inputs.cos_sin_cache.dim() != 2 or inputs.cos_sin_cache.shape[1] != r:
        raise KernelInputError(f"cos_sin_cache: [max_position, {r}] expected, got {tuple(inputs.cos_sin_cache.shape)}")
    _expect_dtypes(inputs)


def contract_violation(inputs: DecodeInputs) -> str | None:
    """What ``check_shapes`` finds, as a back end's ``refuse`` says it; None where the shared contract holds."""
    try:
        check_shapes(inputs)
    except KernelInputError as error:
        return str(error)
    return None


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise KernelInputError(f"{name}: shape {list(shape)} expected, got {list(tensor.shape)}")


def _expect_dtypes(inputs: DecodeInputs) -> None:
    act = inputs.q.dtype
    for name in ("k_pe", "kv_c", "cos_sin_cache"):
        dtype = getattr(inputs, name).dtype
        if dtype != act:
            raise KernelInputError(f"{name}: dtype {act} (that of q) expected, got {dtype}")
    if (broken := inputs.weight.broken(act)) is not None:
        raise KernelInputError(broken)
    for name in ("slot_mapping", "positions"):
        dtype = getattr(inputs, name).dtype
        if dtype != torch.int64:
            raise KernelInputError(f"{name}: torch.int64 expected, got {dtype}")
    for name in ("k_scale", "q_scale"):
        _expect_scale(name, getattr(inputs, name))
    cache = inputs.kv_cache.dtype
    if cache == torch.uint8:
        raise KernelInputError("kv_cache: view uint8 storage as the platform's fp8 type first, got torch.uint8")
    if fp8.is_fp8(cache):
        allowed: tuple[torch.dtype, ...] = (cache, act)
    elif cache == act:
        allowed = (act,)
    else:
        raise KernelInputError(f"kv_cache: an e4m3 type or {act} expected, got {cache}")
    if inputs.out_dtype not in allowed:
        raise KernelInputError(f"out_dtype: one of {allowed} expected beside a {cache} cache, got {inputs.out_dtype}")


def _expect_scale(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype != torch.float32 or tensor.numel() < 1:
        raise KernelInputError(f"{name}: one float32 element expected, got {tensor.numel()} of {tensor.dtype}")
