"""The one InductorPass that vLLM sees: range gate, match, passes 1 to 3 per layer."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

import torch
from torch import fx
from vllm.compilation.passes.inductor_pass import InductorPass, get_pass_context

from vllm_aiter_mla import bucket, fingerprint
from vllm_aiter_mla.admission import admit_layer
from vllm_aiter_mla.census import state as census
from vllm_aiter_mla.compat import layer_view, log
from vllm_aiter_mla.passes.aiter_fusion import MLAAiterQkRopeKVCacheFusionPass
from vllm_aiter_mla.passes.fx import settle
from vllm_aiter_mla.passes.match import LayerMatch, Refused, match_layers
from vllm_aiter_mla.passes.probe import real_tensors
from vllm_aiter_mla.passes.q_prep_lift import MLADecodeQPrepLiftPass
from vllm_aiter_mla.passes.rope_kv_cache import MLARoPEKVCacheFusionPass
from vllm_aiter_mla.runtime import kernel
from vllm_aiter_mla.runtime.kernel import Plan
from vllm_aiter_mla.settings import STRICT_OPTION, Settings, SettingsError


class AiterMLAPipeline(InductorPass):
    """Rewrites the MLA layers of graphs whose compile range lies inside the decode bucket.

    It holds plain values only: vLLM deep-copies it and pickles it to spawned workers.

    Args:
        limit: L, the last token count of the bucket.
        settings: the plugin's options.
        chained: a pass of the user's that stood in this slot before; it runs first, under its own range gate.

    Attributes:
        kernels: what each layer shape runs on in this worker, of ``selfcheck.verdicts``; None until they are checked,
            and nothing is rewritten before.
    """

    def __init__(self, *, limit: int, settings: Settings, chained: InductorPass | None = None) -> None:
        self.limit = limit
        self.settings = settings
        self.chained = chained
        self.kernels: tuple[str, ...] | None = None

    def uuid(self) -> str:
        """Key of vLLM's and Inductor's caches: everything that decides which graph comes out.

        The plugin's sources, the settings, the limit, the kernels of this worker, and the chained pass.
        """
        return InductorPass.hash_dict(
            {
                "fingerprint": fingerprint.fingerprint(),
                "settings": asdict(self.settings),
                "limit": self.limit,
                "kernels": self.kernels,
                "chained": None if self.chained is None else str(self.chained.uuid()),
            }
        )

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        """Whether this or the chained pass wants the range."""
        return self._mine(compile_range) or self._chained_wants(compile_range)

    def __call__(self, graph: fx.Graph) -> None:
        """Run the chained pass, then ours, each where it applies."""
        compile_range = get_pass_context().compile_range
        if self.chained is not None and self._chained_wants(compile_range):
            self.chained(graph)
        if self._mine(compile_range) and self._is_checked():
            counts = rewrite(graph, self.settings)
            census.count(f"{compile_range.start}-{compile_range.end}", counts)

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
        return bucket.in_bucket(compile_range.end, self.limit)

    def _chained_wants(self, compile_range: Any) -> bool:
        return self.chained is not None and self.chained.is_applicable_for_range(compile_range)


def rewrite(graph: fx.Graph, settings: Settings) -> dict[str, int]:
    """Match every MLA layer of ``graph`` and rewrite those that are admitted; returns counts by pass."""
    chain = _Chain(graph, settings.debug.stop_after)
    layers = layer_view.mla_layers()
    matched = refused = 0
    for outcome in match_layers(graph):
        verdict = outcome if isinstance(outcome, Refused) else _admit_guarded(outcome, layers, settings)
        if isinstance(verdict, Refused):
            refused += 1
            census.refuse(verdict.layer_name, verdict.code, verdict.reason)
            log.say_once(logging.DEBUG, f"{verdict.layer_name} stays stock: {verdict.code}: {verdict.reason}")
            continue
        matched += 1
        match, plan, out_dtype = verdict
        try:
            chain.rewrite(match, plan, out_dtype)
        except Exception as error:
            # Every pass emits all of its nodes before it takes one away, so the graph is as the pass before left it.
            reason = f"{type(error).__name__}: {error}"
            census.keep_partial(match.layer_name, "rewrite_failed", reason)
            log.say_once(logging.WARNING, f"a layer could not be rewritten and stays as it was: {reason}")
    settle(graph)
    return {"matched": matched, "refused": refused, **chain.counts()}


class _Chain:
    """The three passes over one graph."""

    def __init__(self, graph: fx.Graph, stop_after: str | None) -> None:
        self.graph = graph
        self.stop_after = stop_after
        self.fuse = MLARoPEKVCacheFusionPass()
        self.lift = MLADecodeQPrepLiftPass()
        self.prepare = MLAAiterQkRopeKVCacheFusionPass()

    def rewrite(self, match: LayerMatch, plan: Plan, out_dtype: torch.dtype) -> None:
        """Run the passes on one layer, up to the one after which the chain stops."""
        if self.stop_after is not None:
            census.keep_partial(match.layer_name, "stop_after", f"debug.stop_after={self.stop_after}")
        whole = self.stop_after is None and plan.refused is None
        fused = self.fuse(self.graph, match, lazy=whole)
        if self.stop_after == "rope_kv_cache":
            return
        lifted = self.lift(self.graph, fused, out_dtype, lazy=whole)
        if self.stop_after == "q_prep_lift":
            return
        if plan.refused is not None:
            census.keep_partial(match.layer_name, "kernel_shape", plan.refused)
            return
        self.prepare(self.graph, lifted)

    def counts(self) -> dict[str, int]:
        """Layers rewritten by each pass."""
        return {
            "rope_kv_cache": self.fuse.rewritten,
            "stock_fused": self.fuse.taken_over,
            "q_prep_lift": self.lift.rewritten,
            "aiter_fusion": self.prepare.rewritten,
        }


Admitted = tuple[LayerMatch, Plan, torch.dtype]


def _admit_guarded(match: LayerMatch, layers: dict[str, Any], settings: Settings) -> Admitted | Refused:
    """``_admit``, with a surprise as a refusal: an exception here would take the engine down."""
    try:
        return _admit(match, layers, settings)
    except Exception as error:
        return Refused(match.layer_name, "not_evaluated", f"admission raised {type(error).__name__}: {error}")


def _admit(match: LayerMatch, layers: dict[str, Any], settings: Settings) -> Admitted | Refused:
    """Layer admission, then the kernel: a layer that no kernel could serve in this process is left alone."""
    layer = layers.get(match.layer_name)
    if layer is None:
        return Refused(match.layer_name, "layer_unknown", "the layer is not in this model's forward context")
    refusal = admit_layer(layer_view.layer_view(layer, match.cos_sin_cache.meta["val"].dtype))
    if refusal is not None:
        return Refused(match.layer_name, refusal.code, refusal.message)
    act = match.q.meta["val"].dtype
    out_dtype = layer_view.prepared_query_dtype(layer, act)
    with real_tensors():
        shape = kernel.shape_of(layer, is_neox=match.is_neox, act=act, out_dtype=out_dtype)
        plan = kernel.plan(layer, shape)
    if plan.unavailable is not None:
        return Refused(match.layer_name, "kernel_unavailable", plan.unavailable)
    partly = plan.refused or (settings.debug.stop_after and f"debug.stop_after={settings.debug.stop_after}")
    if partly and shape.block_size == 1:
        # vLLM's op squeezes dimension 1 of a cache from which that of the single head is gone already.
        reason = f"{partly}; vLLM's fused RoPE and cache op, which would stay, takes no block size of 1"
        return Refused(match.layer_name, "kernel_shape", reason)
    return match, plan, out_dtype
