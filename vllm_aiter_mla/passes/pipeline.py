"""The one InductorPass that vLLM sees: range gate, match, passes 1 to 3 per layer."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import stable_topological_sort

from vllm_aiter_mla import decode_limit, fingerprint, status
from vllm_aiter_mla import layer as layers
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.compat import context, log
from vllm_aiter_mla.compat.inductor import InductorPass, get_pass_context
from vllm_aiter_mla.passes.aiter_fusion import MLAAiterQkRopeKVCacheFusionPass
from vllm_aiter_mla.passes.fx import settle
from vllm_aiter_mla.passes.match import LayerMatch, match_layers
from vllm_aiter_mla.passes.probe import real_tensors
from vllm_aiter_mla.passes.q_prep_lift import MLADecodeQPrepLiftPass
from vllm_aiter_mla.passes.rope_kv_cache import MLARoPEKVCacheFusionPass
from vllm_aiter_mla.settings import STRICT_OPTION, Settings, SettingsError


class AiterMLAPipeline(InductorPass):
    """Rewrites the MLA layers of graphs whose compile range lies inside the decode limit.

    It holds plain values only: vLLM deep-copies it and pickles it to spawned workers.

    Args:
        limit: L, the last token count of the decode limit.
        settings: the plugin's options.
        chained: a pass of the user's that stood in this slot before; it runs first, under its own range gate.
        integration: one of ``INTEGRATIONS``. With "module" nothing is rewritten here: the record of what the
            gate has decided travels to the workers, and into vLLM's cache keys, as the same object.

    Attributes:
        kernels: what each layer shape runs on in this worker, of ``worker.cache_key``; None until they are checked, and
            nothing is rewritten before.
        emitted: what became of each layer of this worker under the module integration, of ``module.emit``.
    """

    def __init__(
        self, *, limit: int, settings: Settings, chained: InductorPass | None = None, integration: str = "passes"
    ) -> None:
        self.limit = limit
        self.integration = integration
        self.settings = settings
        self.chained = chained
        self.kernels: tuple[str, ...] | None = None
        self.emitted: tuple[str, ...] = ()

    def uuid(self) -> str:
        """Key of vLLM's and Inductor's caches: everything that decides which graph comes out.

        The plugin's sources, the settings, the limit, the kernels of this worker, and the chained pass.
        """
        return InductorPass.hash_dict(
            {
                "fingerprint": fingerprint.fingerprint(),
                "settings": asdict(self.settings),
                "limit": self.limit,
                "integration": self.integration,
                "kernels": self.kernels,
                "emitted": self.emitted,
                "chained": None if self.chained is None else str(self.chained.uuid()),
            }
        )

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        """Whether this or the chained pass rewrites graphs of the range."""
        return self._mine(compile_range) or self._chained_wants(compile_range)

    def __call__(self, graph: fx.Graph) -> None:
        """Run the chained pass, then ours, each where it applies."""
        if self.integration == "module":
            # vLLM has asked for the range; where torch compiles without vLLM there is none.
            if self.chained is not None:
                self.chained(graph)
            return
        compile_range = get_pass_context().compile_range
        if self.chained is not None and self._chained_wants(compile_range):
            self.chained(graph)
        if self._mine(compile_range) and self._is_checked():
            counts = rewrite(graph, self.settings)
            status.count(f"{compile_range.start}-{compile_range.end}", counts)

    def _is_checked(self) -> bool:
        """Whether the kernels of this worker were checked: its start-up hook may never have been called.

        Raises:
            SettingsError: they were not, in strict mode.
        """
        if self.kernels is not None:
            return True
        reason = "no graph is rewritten: the kernels of this worker were never checked"
        if self.settings.strict:
            raise SettingsError(f"{log.PREFIX}{reason} ({STRICT_OPTION})")
        log.say_once(logging.ERROR, reason)
        return False

    def _mine(self, compile_range: Any) -> bool:
        return self.integration == "passes" and decode_limit.within_limit(compile_range.end, self.limit)

    def _chained_wants(self, compile_range: Any) -> bool:
        return self.chained is not None and self.chained.is_applicable_for_range(compile_range)


def rewrite(graph: fx.Graph, settings: Settings) -> dict[str, int]:
    """Match every MLA layer of ``graph`` and rewrite those that are admitted; returns counts by pass."""
    chain = _Chain(graph, settings.debug.stop_after)
    modules = context.layers_of_forward_context()
    matched = skipped = 0
    layers_found = match_layers(graph)
    if layers_found:
        # Pass 3 puts in a raw call, and nothing but the order keeps a reader of its buffers behind it.
        stable_topological_sort(graph)
    for name, found in layers_found:
        admitted = found if isinstance(found, Skip) else _admit_guarded(found, modules, settings)
        if isinstance(admitted, Skip):
            skipped += 1
            status.skip(name, admitted.code, admitted.message)
            log.say_once(logging.DEBUG, f"{name} is left to vLLM: {admitted}")
            continue
        matched += 1
        early = _rewrite_guarded(chain, *admitted)
        if early is not None:
            status.skip(name, early.code, early.message)
    settle(graph)
    return {"matched": matched, "skipped": skipped, **chain.counts()}


def _rewrite_guarded(chain: _Chain, match: LayerMatch, early: Skip | None, out_dtype: torch.dtype) -> Skip | None:
    """Run the passes on one layer; why pass 3 did not run on it, or None."""
    try:
        chain.rewrite(match, early, out_dtype)
    except Exception as error:
        # Every pass emits all of its nodes before it takes one away, so the graph is as the pass before left it.
        reason = f"{type(error).__name__}: {error}"
        log.say_once(logging.WARNING, f"a layer could not be rewritten and stays as it was: {reason}")
        return Skip("rewrite_failed", reason)
    return early


class _Chain:
    """The three passes over one graph."""

    def __init__(self, graph: fx.Graph, stop_after: str | None) -> None:
        self.graph = graph
        self.stop_after = stop_after
        self.fuse = MLARoPEKVCacheFusionPass()
        self.lift = MLADecodeQPrepLiftPass()
        self.prepare = MLAAiterQkRopeKVCacheFusionPass()

    def rewrite(self, match: LayerMatch, early: Skip | None, out_dtype: torch.dtype) -> None:
        """Run the passes on one layer; with ``early``, why the third does not run.

        A layer whose kernel refuses it ends after the first: after the second, a batch with prefill rows would be
        prepared for nothing.
        """
        fused = self.fuse(self.graph, match, lazy=early is None)
        if early is not None and self.stop_after != "q_prep_lift":
            return
        lifted = self.lift(self.graph, fused, out_dtype, lazy=early is None)
        if early is None:
            self.prepare(self.graph, lifted)

    def counts(self) -> dict[str, int]:
        """Layers rewritten by each pass."""
        return {
            "rope_kv_cache": self.fuse.rewritten,
            "vllm_fused": self.fuse.taken_over,
            "q_prep_lift": self.lift.rewritten,
            "aiter_fusion": self.prepare.rewritten,
        }


Admitted = tuple[LayerMatch, Skip | None, torch.dtype]
"""A layer that is rewritten, why the passes end before the third or None, and what its decode kernel reads."""


def _admit_guarded(match: LayerMatch, modules: dict[str, Any], settings: Settings) -> Admitted | Skip:
    """``_admit``; an exception there refuses the layer instead of ending the engine."""
    try:
        return _admit(match, modules, settings)
    except Exception as error:
        return Skip("not_evaluated", f"admission raised {type(error).__name__}: {error}")


def _admit(match: LayerMatch, modules: dict[str, Any], settings: Settings) -> Admitted | Skip:
    """Layer admission, then the kernel: a layer that no kernel could serve in this process is left alone."""
    layer = modules.get(match.layer_name)
    if layer is None:
        return Skip("layer_unknown", "the layer is not in this model's forward context")
    act, table = match.q.meta["val"].dtype, match.cos_sin_cache.meta["val"].dtype
    with real_tensors():
        asked = layers.of(layer)
        decision = asked.decide(act, table)
        if decision.skip is not None:
            return decision.skip
        shape = asked.shape()
    early = None
    if settings.debug.stop_after is not None:
        early = Skip("stop_after", f"debug.stop_after={settings.debug.stop_after}")
    if early is not None and shape.block_size == 1:
        # vLLM's op squeezes dimension 1 of a cache that has lost its dimension of the single head already.
        reason = f"{early.message}; vLLM's fused RoPE and cache op, which would stay, takes no block size of 1"
        return Skip("kernel_shape", reason)
    return match, early, shape.out_dtype
