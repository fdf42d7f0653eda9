"""Count what one layer launches, allocates and moves in each kind of batch, with the flag off and on.

The recording of ``verify`` counts the ops of one MLA layer on a CPU, with one launch for each kernel of a GPU.
docs/evidence.md says what is counted, and ``make docs`` writes the tables. tests/tools/test_ledger.py compares flag on
with flag off, and the launches with the formulas of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from tools.common import table

if TYPE_CHECKING:
    from vllm_aiter_mla.verify.engine import Call, Recording

SIDES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "off": (("rope",), ("write", "attention")),
    "on": ((), ("ours",)),
    "off, fused": (("rope and write",), ("attention",)),
    "on, fused": ((), ("ours, fused",)),
}
"""The ops of each side: those that a piecewise graph replays with its pieces, and those that Python calls.

Two sides over vLLM's default options, and two with graph partition, which brings vLLM's own RoPE + KV fusion."""
CACHES = ("fp8", "auto")
SHOWN = ("all decode", "all decode, 20 heads", "one prefill among decodes")
OVERWRITTEN = frozenset({"aten.copy_", "aten.fill_", "aten.zero_", "aten.index_copy_"})
"""In-place ops that do not read what they write."""


class Cost(NamedTuple):
    """What one layer costs in one batch: kernels launched, buffers allocated, bytes read and written."""

    launches: int
    allocations: int
    moved: int

    def __str__(self) -> str:
        """Return a cell: ``launches / allocations / bytes``."""
        return f"{self.launches} / {self.allocations} / {self.moved}"


class Counted(NamedTuple):
    """One batch on one side: what a piecewise graph would replay, and what Python calls."""

    replayed: Recording
    called: Recording

    @property
    def calls(self) -> list[Call]:
        """The launches in order."""
        return self.replayed.calls + self.called.calls

    @property
    def cost(self) -> Cost:
        """The sum over the launches. A buffer without bytes is not allocated."""
        allocations = sum(prod(shape) > 0 for one in self for _, shape in one.shapes)
        return Cost(len(self.calls), allocations, sum(map(moved, self.calls)))


Sides = Mapping[str, Mapping[str, Counted]]
"""By side and kind of batch."""


def count_all() -> dict[str, Sides]:
    """Return what is counted over each cache."""
    return {cache: {side: count(side, cache) for side in SIDES} for cache in CACHES}


def count(side: str, cache: str) -> dict[str, Counted]:
    """Return what one of ``SIDES`` does over one of ``CACHES``, by kind of batch."""
    from tools.counting import stub_layer

    found = {}
    for kind in stub_layer.BATCHES:
        with stub_layer.step(cache, kind) as layer, _one_launch_each(layer):
            calls = stub_layer.calls(layer)
            sides = [[calls[name] for name in names] for names in SIDES[side]]
            for _ in range(2):  # a rotary table is copied once, at the first call
                found[kind] = Counted(*map(record, sides))
    return found


def record(calls: Iterable[Callable[[], Any]]) -> Recording:
    """Return what the calls launch. An op of ``vllm`` or ours is Python, and what it calls is recorded instead."""
    from tests.sandbox.rehearsal_card import Launches

    with Launches() as made:
        for call in calls:
            call()
    return made


@contextmanager
def _one_launch_each(layer: Any) -> Iterator[None]:
    """Let the Python functions that are one kernel on a GPU be recorded as one launch each."""
    from vllm.platforms import current_platform

    from tests.sandbox.interpreter import one_launch

    def quantised(absorbed: torch.Tensor, q_pe: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        shape = (*absorbed.shape[:-1], absorbed.shape[-1] + q_pe.shape[-1])
        return absorbed.new_empty(shape, dtype=current_platform.fp8_dtype())

    write = one_launch("concat_and_cache_mla", layer.impl.do_kv_cache_update)
    decode = one_launch("decode attention", type(layer.impl).decode)
    with (
        mock.patch.object(layer.impl, "do_kv_cache_update", write),
        mock.patch.object(type(layer.impl), "decode", decode),
        mock.patch.object(layer._decode_concat_quant_fp8_op, "forward", one_launch("concat + fp8", quantised)),
    ):
        yield


def moved(call: Call) -> int:
    """Return the bytes that a launch has to read and write at least once. Scales are left out."""
    if call.name in KERNELS:
        return KERNELS[call.name](*call.args)
    arguments = call.run._schema.arguments if hasattr(call.run, "_schema") else ()
    given = dict(zip((argument.name for argument in arguments), call.args, strict=False)) | call.kwargs
    changed = [
        given.get(argument.name)
        for argument in arguments
        if argument.alias_info and argument.alias_info.is_write and not argument.is_out
    ]
    return sizes(call.args, call.kwargs, call.fresh, () if call.name in OVERWRITTEN else changed)


def sizes(*values: Any) -> int:
    """Return the bytes of all tensors among the values but scales. A broadcast dimension counts once."""
    return sum(
        value.itemsize * prod(length for length, stride in zip(value.shape, value.stride(), strict=True) if stride)
        for value in tree_leaves(values)
        if isinstance(value, torch.Tensor) and value.dim()
    )


# Bytes of the kernels that a CPU runs in many steps. Rows count as the kernel handles them: of a table, a cache or a
# slot mapping only the rows of this batch are read and written.


def rotary(*args: Any) -> int:
    """``rotary_embedding``: query and key are read and written, with one row of the table per position."""
    positions, query, key, _, table, *_ = args
    return 2 * sizes(query, key) + sizes(positions) + positions.numel() * sizes(table[0])


def rope_and_write(*args: Any) -> int:
    """``concat_and_cache_mla_rope_fused``: q_pe and k_pe are read and written, and the KV row of each slot.

    The kernel returns before it touches k_pe, kv_c and the cache where the slot is negative.
    """
    positions, q_pe, k_pe, kv_c, table, _, slots, cache, *_ = args
    rows = slots.numel()
    rotated = 2 * sizes(q_pe[:rows]) + rows * sizes(table[0]) + sizes(positions[:rows])
    return rotated + real(slots) * sizes(k_pe[0]) + write(kv_c, k_pe, cache, slots)


def rope_prepare_and_write(*args: Any) -> int:
    """``fused_qk_rope_concat_and_cache_mla``: the query is read and its prepared form written, and the KV rows."""
    q_latent, q_pe, kv_c, k_pe, cache, q_out, slots, _, _, positions, cos, sin, *_ = args
    rows = slots.numel()
    query = sizes(q_latent[:rows], q_pe[:rows], q_out[:rows], positions[:rows])
    return query + rows * sizes(cos[0], sin[0]) + write(kv_c, k_pe, cache, slots)


def write(kv_c: torch.Tensor, k_pe: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, *_: Any) -> int:
    """``concat_and_cache_mla``: rotated keys are read, and the KV row of each slot is written."""
    return sizes(slots) + real(slots) * (sizes(kv_c[0], k_pe[0]) + cache.shape[-1] * cache.itemsize)


def real(slots: torch.Tensor) -> int:
    """Return how many rows have a slot."""
    return int((slots >= 0).sum())


KERNELS: dict[str, Callable[..., int]] = {
    "_C.rotary_embedding": rotary,
    "_C_cache_ops.concat_and_cache_mla_rope_fused": rope_and_write,
    "aiter.fused_qk_rope_concat_and_cache_mla": rope_prepare_and_write,
    "concat_and_cache_mla": write,
}
"""Bytes of one launch by its name."""


def render(counted: Mapping[str, Sides]) -> str:
    """Return the tables as Markdown: costs, and for ``SHOWN`` the launches in order."""
    lines = []
    for cache, sides in counted.items():
        kinds = sides["off"]
        costs = [(kind, *(of[kind].cost for of in sides.values())) for kind in kinds]
        order = [(kind, side, _order(of[kind])) for kind in SHOWN for side, of in sides.items()]
        lines += [f"## KV cache: {cache}", "", *table(("batch", *SIDES), costs, "---")]
        lines += ["", *table(("batch", "side", "launches in order; (replayed by a piecewise graph)"), order, "---"), ""]
    return "\n".join(lines).strip()


def _order(counted: Counted) -> str:
    replayed, called = ([name.rpartition(".")[2] for name in one.names] for one in counted)
    return ", ".join([*(f"({name})" for name in replayed), *called])
