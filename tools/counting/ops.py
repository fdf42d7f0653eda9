"""Count the ops of one layer without an engine: quick, and without what Inductor makes around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from tools.counting import launches, stub_layer
from tools.counting.counter import Counter, Event, sizes

Call = Callable[[], Any]
SIDES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "vllm": (("rope", "write"), ("attention",)),
    "vLLM's own fusions": (("rope and write",), ("attention",)),
    "ours": ((), ("ours",)),
}
"""The ops of each side: those that a piecewise graph replays with its pieces, and those that Python calls."""


def count(side: str, cache: str) -> dict[str, list[Event]]:
    """The events of a side by kind of batch.

    Args:
        side: one of ``SIDES``.
        cache: "fp8" or "auto".
    """
    found = {}
    for kind, batch in stub_layer.BATCHES.items():
        with stub_layer.step(cache, batch) as layer:
            calls = stub_layer.calls(layer)
            captured, called = ([calls[name] for name in names] for names in SIDES[side])
            _counted(layer, captured, called)  # a rotary table is copied once, at the first call
            found[kind] = _counted(layer, captured, called)
    return found


def _counted(layer: Any, captured: Sequence[Call], called: Sequence[Call]) -> list[Event]:
    counter = Counter(launches.KERNELS)

    def quantised(absorbed: torch.Tensor, q_pe: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        shape = (*absorbed.shape[:-1], absorbed.shape[-1] + q_pe.shape[-1])
        return absorbed.new_empty(shape, dtype=stub_layer.fp8_dtype())

    write = counter.one_launch(
        "concat_and_cache_mla", layer.impl.do_kv_cache_update, lambda _, *args: launches.concat_and_write(*args[:4])
    )
    quantise = counter.one_launch("concat + fp8", quantised, lambda result, *args: sizes((result, *args)), 1)
    decode = counter.one_launch(
        "decode attention", layer.impl.forward_mqa, lambda result, q, *_: sizes((q, result[0])), 1
    )

    def forward_mqa(q: Any, *rest: Any) -> Any:
        return decode(torch.cat(q, dim=-1) if isinstance(q, tuple) else q, *rest)

    with (
        mock.patch.object(layer.impl, "do_kv_cache_update", write),
        mock.patch.object(layer.impl, "forward_mqa", forward_mqa),
        mock.patch.object(layer._decode_concat_quant_fp8_op, "forward", quantise),
        counter,
    ):
        with counter.inside_a_piece():
            for call in captured:
                call()
        for call in called:
            call()
    return [event for event in counter.events if event.launches or event.allocations]
