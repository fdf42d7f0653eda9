# SPDX-License-Identifier: Apache-2.0
"""The one Inductor pass that vLLM sees: compile range, match, admission, then passes 1 to 3 on each layer."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import stable_topological_sort

from vllm_aiter_mla import admission, packages
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.compat.inductor import InductorPass, VllmInductorPass, VllmPatternMatcherPass, get_pass_context
from vllm_aiter_mla.passes.aiter_fusion import fuse_into_one_op
from vllm_aiter_mla.passes.match import LayerMatch, match_layers
from vllm_aiter_mla.passes.q_prep_lift import lift_q_prep
from vllm_aiter_mla.passes.rope_kv import fuse_rope_and_kv_write
from vllm_aiter_mla.passes.rope_probe import real_tensors
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.settings import STRICT_OPTION, Settings, SettingsError
from vllm_aiter_mla.status.liveness import ensure_run_name

PASSES = {"rope_kv_cache": fuse_rope_and_kv_write, "q_prep_lift": lift_q_prep, "aiter_fusion": fuse_into_one_op}
"""What runs on each layer, in order."""


class AiterMLAPipeline(VllmInductorPass):
    """Rewrites the MLA layers of graphs whose compile range ends at or below the decode limit.

    vLLM deep-copies it and pickles it to spawned workers. vLLM's options for its own passes apply: a
    ``debug_dump_path`` holds the graph before and after, and debug logs show the time and the number of layers.

    Args:
        config: vLLM's config; only what ``VllmInductorPass`` reads of it is kept.
        limit: the decode limit in tokens.
        settings: the plugin's options.
        chained: a pass of the user's that was in this slot before; it runs first, in the compile ranges that it wants.
        integration: one of ``INTEGRATIONS``. With "module" nothing is rewritten here. This object then only carries
            the gate's decision to the workers and into vLLM's cache keys.
    """

    def __init__(
        self,
        config: Any,
        *,
        limit: int,
        settings: Settings,
        chained: InductorPass | None = None,
        integration: str = "passes",
    ) -> None:
        super().__init__(config)
        self.limit = limit
        self.integration = integration
        self.settings = settings
        self.chained = chained
        # What the layers of this worker run on. No graph is rewritten while it is None: the kernels are not checked.
        self.key: tuple[str, ...] | None = None
        # Of the process that has read the options: a worker of Ray inherits no variable of ours.
        self.run = ensure_run_name()

    def uuid(self) -> str:
        """Return the key for vLLM's and Inductor's caches: a hash of everything that decides which graph comes out.

        The plugin's sources, the settings, the limit, the kernels of this worker, and the chained pass.
        """
        return self.hash_dict(
            {
                "fingerprint": packages.fingerprint(),
                "settings": asdict(self.settings),
                "limit": self.limit,
                "integration": self.integration,
                "key": self.key,
                "chained": None if self.chained is None else str(self.chained.uuid()),
            }
        )

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        """Return whether this or the chained pass rewrites graphs of the range."""
        return self._mine(compile_range) or self._chained_wants(compile_range)

    def __call__(self, graph: fx.Graph) -> None:
        """Run the chained pass, then ours, each where it applies."""
        if self.integration == "module":
            # vLLM has asked for the range. If torch compiles without vLLM, there is no range.
            if self.chained is not None:
                self.chained(graph)
            return
        compile_range = get_pass_context().compile_range
        if self.chained is not None and self._chained_wants(compile_range):
            self.chained(graph)
        if self._mine(compile_range) and self._is_checked():
            self._rewrite(graph)

    @VllmInductorPass.time_and_log  # type: ignore[arg-type]
    def _rewrite(self, graph: fx.Graph) -> None:
        compile_range, modules = get_pass_context().compile_range, compat_layer.layers_of_forward_context()
        counts = rewrite(graph, modules)
        VllmPatternMatcherPass.match_table[self.pass_name] += counts["matched"]
        layers = (layer for module in modules.values() if (layer := Layer.kept_on(module)) is not None)
        if (layer := next(layers, None)) is not None:  # all layers of an engine share its status
            layer.engine_status.add_pass_counts(f"{compile_range.start}-{compile_range.end}", counts)

    def _is_checked(self) -> bool:
        """Return whether the kernels of this worker were checked: its start-up hook may never have been called.

        Raises:
            SettingsError: they were not, in strict mode.
        """
        if self.key is not None:
            return True
        reason = "no graph is rewritten: the kernels of this worker were never checked"
        if self.settings.strict:
            raise SettingsError(f"{log.PREFIX}{reason} ({STRICT_OPTION})")
        log.say_once(logging.ERROR, reason)
        return False

    def _mine(self, compile_range: Any) -> bool:
        return self.integration == "passes" and admission.is_within_limit(compile_range.end, self.limit)

    def _chained_wants(self, compile_range: Any) -> bool:
        return self.chained is not None and self.chained.is_applicable_for_range(compile_range)


def rewrite(graph: fx.Graph, modules: Mapping[str, Any]) -> dict[str, int]:
    """Match every MLA layer of ``graph`` and rewrite those that are admitted; return the layers by pass.

    ``modules`` are vLLM's layers by name. Fake values of new nodes are left to torch, which infers them after the last
    custom pass.
    """
    # As vLLM's PostCleanupPass does next: the matcher must not see dead readers, and pass 3 needs the order.
    stable_topological_sort(graph)
    graph.eliminate_dead_code()
    counts = dict.fromkeys(("matched", "skipped", "rope_kv_cache", "vllm_fused", "q_prep_lift", "aiter_fusion"), 0)
    for name, found in match_layers(graph):
        dtype_or_skip = found if isinstance(found, Skip) else _query_dtype_or_skip(found, modules)
        if isinstance(dtype_or_skip, Skip):
            counts["skipped"] += 1
            log.say_once(logging.DEBUG, f"{name} is left to vLLM: {dtype_or_skip}")
            with real_tensors():
                Layer.skip_in_graph(modules.get(name), dtype_or_skip)
            continue
        assert isinstance(found, LayerMatch)
        found.out_dtype = dtype_or_skip
        try:
            with all_or_nothing(graph):
                for run in PASSES.values():
                    run(graph, found)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            log.say_once(logging.WARNING, f"a layer could not be rewritten and stays as it was: {reason}")
            Layer.skip_in_graph(modules.get(name), Skip("rewrite_failed", reason))
            counts["skipped"] += 1
            continue
        counts["matched"] += 1
        for pass_name in PASSES:
            counts["vllm_fused" if pass_name == "rope_kv_cache" and found.prefused else pass_name] += 1
    graph.eliminate_dead_code()
    return counts


@contextmanager
def all_or_nothing(graph: fx.Graph) -> Iterator[None]:
    """Put every node of ``graph`` back as it was if the block raises. The block may add and change nodes, not erase."""
    before = {node: (node.args, node.kwargs) for node in graph.nodes}
    try:
        yield
    except BaseException:
        for node, (args, kwargs) in before.items():
            node.args, node.kwargs = args, kwargs
        for node in reversed(graph.nodes):
            if node not in before:
                graph.erase_node(node)
        raise


def _query_dtype_or_skip(match: LayerMatch, modules: Mapping[str, Any]) -> torch.dtype | Skip:
    """Return the dtype of the prepared query, which the layer's decode kernel reads, or why vLLM keeps the layer."""
    module = modules.get(match.layer_name)
    if module is None:
        return Skip("layer_unknown", "the layer is not in this model's forward context")
    act, table = match.q.meta["val"].dtype, match.cos_sin_cache.meta["val"].dtype
    try:
        if match.rotation == compat_layer.ROTARY_KERNEL and compat_layer.emulates_casts(module):
            return Skip("rope_other_operand", "with emulate_precision_casts Inductor's RoPE rounds more than once")
        with real_tensors():
            layer = Layer.of(module)
            return layer.why_skipped(act, table) or layer.query_dtype(act)
    except Exception as error:
        return Skip("not_evaluated", f"admission raised {type(error).__name__}: {error}")
