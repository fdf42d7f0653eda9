"""The node that writes a layer's KV rows, in its two forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx


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
        """Read a ``unified_mla_kv_cache_update``."""
        names = ("kv_c_normed", "k_pe", "layer_name", "kv_cache_dtype", "k_scale")
        args = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        return KVUpdate(
            node=node,
            nodes={node},
            kv_c=args["kv_c_normed"],  # type: ignore[arg-type]
            k_rotated=args["k_pe"],  # type: ignore[arg-type]
            layer_name=args["layer_name"],
            dtype=args["kv_cache_dtype"],  # type: ignore[arg-type]
            k_scale=args["k_scale"],  # type: ignore[arg-type]
            prefused=False,
        )

    @staticmethod
    def of_fused(node: fx.Node) -> KVUpdate:
        """Read a functionalised ``fused_rope_unified_mla_kv_cache_update``."""
        kw = node.kwargs
        return KVUpdate(
            node=node,
            nodes={node, *node.users},
            kv_c=kw["kv_c"],  # type: ignore[arg-type]
            k_rotated=None,
            layer_name=kw["layer_name"],
            dtype=kw["kv_cache_dtype"],  # type: ignore[arg-type]
            k_scale=kw["kv_cache_scale"],  # type: ignore[arg-type]
            prefused=True,
        )
