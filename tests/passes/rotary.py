"""RoPE in the spellings of vLLM's rotary modules, as aten nodes. Each takes q_pe [T, N, R] and k_pe [T, 1, R]."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

if TYPE_CHECKING:
    from tests.passes.graphs import Builder, Spelling

aten = torch.ops.aten
END = 9223372036854775807
Pair = tuple[fx.Node, fx.Node]


def plain(b: Builder, s: Spelling, q: fx.Node, k: fx.Node) -> Pair:
    """``RotaryEmbedding.forward_static``: two products per half."""
    cos, sin = _halves(b, s)

    def rotate(x: fx.Node) -> fx.Node:
        c, n = b(aten.unsqueeze.default, cos, -2), b(aten.unsqueeze.default, sin, -2)
        first, second = _parts(b, s, x)
        o1 = b(aten.sub.Tensor, b(aten.mul.Tensor, first, c), b(aten.mul.Tensor, second, n))
        o2 = b(aten.add.Tensor, b(aten.mul.Tensor, second, c), b(aten.mul.Tensor, first, n))
        return _join(b, s, o1, o2, x)

    return rotate(q), rotate(k)


def deepseek(b: Builder, s: Spelling, q: fx.Node, k: fx.Node) -> Pair:
    """``DeepseekScalingRotaryEmbedding.forward_static``: ``x * cos + rotate(x) * sin`` over a widened table."""
    cos, sin = (_widened(b, s, half) for half in _halves(b, s))

    def rotate(x: fx.Node) -> fx.Node:
        first, second = _parts(b, s, x)
        turned = _join(b, s, b(aten.neg.default, second), first, x)
        return b(aten.add.Tensor, b(aten.mul.Tensor, x, cos), b(aten.mul.Tensor, turned, sin))

    return rotate(q), rotate(k)


def custom_op(op: Callable[[], Any], flat: bool = False, **extra: Any) -> Callable[..., Pair]:
    """An in-place rotary op; ``flat`` hands its operands over as [T, heads * R]."""

    def rope(b: Builder, s: Spelling, q: fx.Node, k: fx.Node) -> Pair:
        r, n = s.sizes.r, s.sizes.n
        call = b(
            auto_functionalized, op(), positions=b.positions, query=b.view(q, -1, n * r) if flat else q,
            key=b.view(k, -1, r) if flat else k, head_size=r, cos_sin_cache=b.table, is_neox=s.is_neox, **extra,
        )  # fmt: skip
        q_rotated, k_rotated = (b(operator.getitem, call, index) for index in (1, 2))
        return (b.view(q_rotated, -1, n, r), b.view(k_rotated, -1, 1, r)) if flat else (q_rotated, k_rotated)

    return rope


def _halves(b: Builder, s: Spelling) -> Pair:
    rows = b.lookup(b.table, b.positions, s.lookup)
    pieces = b(aten.split.Tensor, rows, s.sizes.r // 2, -1)
    return b(operator.getitem, pieces, 0), b(operator.getitem, pieces, 1)


def _parts(b: Builder, s: Spelling, x: fx.Node) -> Pair:
    if s.is_neox:
        pieces = b(aten.split.Tensor, x, s.sizes.r // 2, -1)
        return b(operator.getitem, pieces, 0), b(operator.getitem, pieces, 1)
    return b(aten.slice.Tensor, x, 2, 0, END, 2), b(aten.slice.Tensor, x, 2, 1, END, 2)


def _join(b: Builder, s: Spelling, first: fx.Node, second: fx.Node, like: fx.Node) -> fx.Node:
    if s.is_neox:
        return b(aten.cat.default, [first, second], -1)
    # Inductor turns a stack into a cat of unsqueezed parts.
    parts = [b(aten.unsqueeze.default, part, 3) for part in (first, second)]
    return b.view(b(aten.cat.default, parts, -1), -1, like.meta["val"].shape[1], s.sizes.r)


def _widened(b: Builder, s: Spelling, half: fx.Node) -> fx.Node:
    if s.is_neox:
        return b(aten.unsqueeze.default, b(aten.cat.default, [half, half], -1), -2)
    wide = b(aten.expand.default, b(aten.unsqueeze.default, half, 2), [b.t, s.sizes.r // 2, 2])
    wide = b(aten.clone.default, wide, memory_format=torch.contiguous_format)
    return b(aten.unsqueeze.default, b(aten.reshape.default, wide, [b.t, s.sizes.r]), -2)


def aiter_op() -> Any:
    """AITER's rotary op, which vLLM registers on ROCm only; its schema is enough here."""
    if not hasattr(torch.ops.vllm, "rocm_aiter_triton_rotary_embedding"):
        library = torch.library.Library("vllm", "FRAGMENT")
        library.define(
            "rocm_aiter_triton_rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!) key, SymInt head_size,"
            " Tensor cos_sin_cache, bool is_neox, Tensor? offsets=None) -> ()"
        )
        _LIBRARIES.append(library)
    return torch.ops.vllm.rocm_aiter_triton_rotary_embedding.default


def none(b: Builder, s: Spelling, q: fx.Node, k: fx.Node) -> Pair:
    return q, k


_LIBRARIES: list[torch.library.Library] = []
_ROTARY = {"rope_dim_offset": 0, "inverse": False}
ROPES: dict[str, Callable[..., Pair]] = {
    "none": none,
    "plain": plain,
    "deepseek": deepseek,
    "op": custom_op(lambda: torch.ops._C.rotary_embedding.default, **_ROTARY),
    "op, flat": custom_op(lambda: torch.ops._C.rotary_embedding.default, flat=True, **_ROTARY),
    "flashinfer": custom_op(lambda: torch.ops.vllm.flashinfer_rotary_embedding.default),
    "aiter": custom_op(aiter_op, offsets=None),
}
