"""The node that writes a layer's KV rows, in its two forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from vllm_aiter_mla.passes.arguments import refuse_unknown

UPDATE_ARGS = ("kv_c_normed", "k_pe", "layer_name", "kv_cache_dtype", "k_scale")
FUSED_ARGS = (
    "positions", "q_pe", "k_pe", "kv_c", "cos_sin_cache", "is_neox", "kv_cache_dtype", "kv_cache_scale", "layer_name",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KVUpdate:
    """The node that writes the KV rows, and its arguments. ``k_rotated`` is None where it rotates the key itself."""

    node: fx.Node
    nodes: set[fx.Node]
    kv_c: fx.Node
    k_rotated: fx.Node | None
    layer_name: Any
    dtype: str
    k_scale: fx.Node
    prefused: bool

    @staticmethod
    def of_update(node: fx.Node) -> KVUpdate:
        """Read a ``unified_mla_kv_cache_update``; raises ``NoMatchError`` for an argument that is not known."""
        args = refuse_unknown(node, UPDATE_ARGS)
        return KVUpdate(
            node=node,
            nodes={node},
            kv_c=args["kv_c_normed"],
            k_rotated=args["k_pe"],
            layer_name=args["layer_name"],
            dtype=args["kv_cache_dtype"],
            k_scale=args["k_scale"],
            prefused=False,
        )

    @staticmethod
    def of_fused(node: fx.Node) -> KVUpdate:
        """Read a functionalised ``fused_rope_unified_mla_kv_cache_update``; raises as ``of_update`` does."""
        args = refuse_unknown(node, FUSED_ARGS)
        return KVUpdate(
            node=node,
            nodes={node, *node.users},
            kv_c=args["kv_c"],
            k_rotated=None,
            layer_name=args["layer_name"],
            dtype=args["kv_cache_dtype"],
            k_scale=args["kv_cache_scale"],
            prefused=True,
        )
