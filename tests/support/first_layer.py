"""Planted bugs: every layer gets what belongs to the first one. The tests of passes, ops and engines plant the same.

``ran`` is called each time that a layer gets something else than its own.
"""

from collections.abc import Callable
from typing import Any

from torch import fx

from vllm_aiter_mla.passes.aiter_fusion import fuse_into_one_op
from vllm_aiter_mla.passes.match import LayerMatch
from vllm_aiter_mla.serving.layer import Layer

Pass = Callable[[fx.Graph, LayerMatch], None]


def pass_three(field: str = "k_scale", ran: Callable[[], None] = lambda: None) -> Pass:
    """Return a pass 3 that gives every layer of a graph a field of the first layer's record."""
    of_graph: dict[fx.Graph, Any] = {}

    def fuse(graph: fx.Graph, layer: LayerMatch) -> None:
        first = of_graph.setdefault(graph, getattr(layer, field))
        if first is not getattr(layer, field):
            setattr(layer, field, first)
            ran()
        fuse_into_one_op(graph, layer)

    return fuse


def q_scale(ran: Callable[[], None] = lambda: None) -> property:
    """Return a ``Layer.q_scale`` that gives every layer of the process the scale of the first one that is asked."""
    own, asked = Layer.q_scale.fget, dict[str, Any]()  # type: ignore[attr-defined]

    def of_the_first(layer: Layer) -> Any:
        first = asked.setdefault("first", own(layer))
        if first is not own(layer):
            ran()
        return first

    return property(of_the_first)
