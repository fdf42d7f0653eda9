# SPDX-License-Identifier: Apache-2.0
"""One object per MLA layer: its facts, checks and figures, the decision that follows, and its calls in serving.

The object is kept on vLLM's own module and lives as long as its engine, so nothing that is decided for one engine
reaches another. The passes ask it before they rewrite a layer, start-up checks and times its kernels, and the ops call
it in each step. ``decision.decide`` decides; this object keeps the result until one of the inputs changes.
"""

import logging
import re
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from vllm_aiter_mla.admission import Skip, layer_skips
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.decided import VLLM, Decision, LayerState
from vllm_aiter_mla.kernels import absorb, vllm_own
from vllm_aiter_mla.kernels.backend import KernelBackend, Run
from vllm_aiter_mla.kernels.inputs import DecodeInputs, LayerShape, step_key
from vllm_aiter_mla.serving import backends, decision
from vllm_aiter_mla.serving.backends import Backends
from vllm_aiter_mla.serving.decision import Checked, Figures, LayerFacts
from vllm_aiter_mla.status.engine_status import EngineStatus

_KEY = "_aiter_mla_layer"  # attribute of vLLM's module that holds its ``Layer``
GRAPHS_KEEP = "graphs that were captured keep the kernel"
"""Part of the log line about a layer that falls back while it serves."""
_MAX_RUNS = 4096  # call shapes that a layer remembers; more than the token counts of any decode limit


class Layer:
    """One MLA layer of one engine.

    The kernel that runs calls of one shape is bound once and remembered. Weights, scales and the cache are read per
    call, because vLLM replaces them: if one of them is another tensor than before, all kernels are bound again.

    Attributes:
        name: vLLM's name of the layer.
        module: vLLM's ``MLAAttention``.
        backends: the kernel back ends of its engine.
        padded: how to decode more heads than the layer has; None if vLLM pads none here.
        out_heads: M, the heads that a kernel may lay a query out for, so that vLLM does not copy it; 0 if vLLM pads
            none.
        limit: the decode limit, the most tokens that a kernel is given.
        engine_status: the status of its engine, which the layer corrects when it falls back.
        graph_skip: why the layer's graph, or its wrapper, does not call the op for it; None if it does, or if unknown.
        ran_kernel: the kernel of ours that the layer counts as engaged with; "" before its op has run. Where vLLM's own
            kernel ran, it is the first of ours that runs at other token counts.
        possible_kernels: the kernels that may run it, once its op was called without a batch; None before.
        rotary_emb: vLLM's module that rotates for it, if the layer's wrapper calls the op; else None.
    """

    def __init__(
        self,
        module: Any,
        backends: Backends,
        status: EngineStatus | None = None,
        limit: int = sys.maxsize,
        block_size: int | None = None,
    ) -> None:
        self.name, self.module = str(getattr(module, "layer_name", "")), module
        self.backends, self.engine_status, self.limit = backends, status or EngineStatus(), limit
        self._block_size = block_size  # None: that of the config now
        padded, arch = compat_layer.padded_heads(module), self.backends.platform.arch
        if padded and vllm_own.may_take_parts(arch, module.num_heads, module.kv_cache_dtype.startswith("fp8")):
            padded = None
        self.padded, self.out_heads = padded, padded.heads if padded else 0
        self.graph_skip: Skip | None = None
        self.ran_kernel = ""
        self.possible_kernels: tuple[str, ...] | None = None
        self.rotary_emb: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
        self._batch_skip: Skip | None = None  # why the last batch that was bound went to vLLM's attention
        self._stopped: Skip | None = None  # why no kernel of ours may run it any more
        self._checks: dict[str, Checked] | None = None
        self._checked_for: LayerShape | None = None
        self._figures: Figures | None = None
        self._decision: Decision | None = None
        self._buffers = getattr(module, "_buffers", {})  # a look-up through the module takes ten times as long
        self._weight: absorb.AbsorbWeight | None = None
        self._tensors: tuple[tuple[str, torch.Tensor], ...] = ()
        self._dtypes: dict[torch.dtype, torch.dtype] = {}
        # The kernel of each call shape, with its name. They hold for the weight and query scale of ``_bound_with``, and
        # for rotary tables and cache scales of ``_table_and_scale_form``.
        self._runs: dict[tuple[Any, ...], tuple[str, Run | None]] = {}
        self._bound_with: tuple[Any, Any] = (None, None)
        self._table_and_scale: tuple[Any, Any] = (None, None)
        self._table_and_scale_form: tuple[Any, ...] = ()
        self._cache: Callable[[], torch.Tensor | None] = lambda: None
        self._view: torch.Tensor | None = None

    @classmethod
    def of(cls, module: Any) -> "Layer":
        """Return the layer that vLLM's ``MLAAttention`` module keeps.

        If no engine has loaded the module, make a layer that nobody has checked, so that it runs vLLM's own kernels.
        """
        layer: Layer | None = module.__dict__.get(_KEY)
        return cls(module, backends.of_config(compat_layer.config_of(module))).keep() if layer is None else layer

    @classmethod
    def kept_on(cls, module: Any) -> "Layer | None":
        """Return the layer that a module of vLLM's keeps, or None."""
        layer: Layer | None = module.__dict__.get(_KEY)
        return layer

    def keep(self) -> "Layer":
        """Let vLLM's module keep this layer from now on, so that it lives as long as the module; return it."""
        self.module.__dict__[_KEY] = self
        return self

    @classmethod
    def skip_in_graph(cls, module: Any, skip: Skip) -> None:
        """Note why a graph, or a wrapper, does not call the op for the layer of ``module``, if it can have one."""
        with suppress(Exception):
            cls.of(module).graph_skip = skip

    # What is decided about the layer.

    def shape(self) -> LayerShape:
        """Return what decides the kernel of the layer, without a batch: the one key of its checks and timings.

        vLLM's module does not know the rotary style, so checks try both and ``is_neox`` is always False here.

        Raises:
            UnknownWeightError: the absorbed weight has no format that the kernels know.
        """
        module = self.module
        act = compat_layer.activation_dtype(module)
        assert act is not None, "admission skips a layer without an absorbed weight"
        weight = self.weight()
        quantised = module.kv_cache_dtype.startswith("fp8")
        return LayerShape(
            heads=module.num_heads,
            nope_dim=module.qk_nope_head_dim,
            cache_dtype=compat_layer.fp8_dtype() if quantised else act,
            out_dtype=self.query_dtype(act),
            block_size=self._block_size or compat_layer.block_size(module),
            is_neox=False,
            act=act,
            device=weight.tensors[0][1].device,
            latent=module.kv_lora_rank,
            rope=module.qk_rope_head_dim,
            weight=weight.key,
            out_heads=self.out_heads,
        )

    @property
    def decision(self) -> Decision:
        """What runs the layer, or why no kernel of ours does; decided again once an input has changed."""
        if self._decision is None:
            facts = self.facts()
            # A reload may bring another format of the weight: what was checked for the shape before says nothing of it.
            same = facts.skip is not None or self._checked_for is None or self._checked_for == self.shape()
            checks = self.checks if same else {}
            self._decision = decision.decide(facts, checks, self._figures, self.backends.settings)
        return self._decision

    def facts(self) -> LayerFacts:
        """Return what is known of the layer before its kernels are checked and timed.

        Raises:
            UnknownWeightError: the absorbed weight has no format that the kernels know.
        """
        skip = self._stopped or self.not_admitted()
        if skip is not None:
            return LayerFacts(skip)
        shape = self.shape()
        points, offers = self.backends.offers(shape, self.limit)
        return LayerFacts(None, offers, points, absorb.drops_values(shape.weight[0], shape.nope_dim))

    def not_admitted(self, act: torch.dtype | None = None, table_dtype: torch.dtype | None = None) -> Skip | None:
        """Return why no kernel may run the layer, from its own facts and the dtypes that a graph shows."""
        return next(iter(layer_skips(compat_layer.layer_view(self.module, table_dtype, act))), None)

    def why_skipped(self, act: torch.dtype | None = None, table_dtype: torch.dtype | None = None) -> Skip | None:
        """Return why a graph must not call the op for this layer, or None."""
        return self.decision.skip or self.not_admitted(act, table_dtype)

    def cache_key(self) -> str:
        """Return what the layer will run on, or why it will not: a part of the compile cache's key.

        A graph is rewritten or not by this, and vLLM's own keys do not know AITER, the card or a failed check. Which of
        several kernels timing chose is not part of it: the same op is in the graph whichever kernel it then runs.
        """
        skip = self.decision.skip
        if skip is not None:  # not the message: what an exception says may differ at every start
            return f"{self.name}: {skip.code}"
        # The card by its type: its index differs from rank to rank, and may from start to start.
        shape = self.shape()
        kind = replace(shape, device=torch.device(shape.device).type)
        return f"{kind}: {'timed' if self.is_timed else self.decision.our_first_kernel or VLLM}"

    # What start-up finds out about it.

    def kernels_to_check(self) -> dict[str, KernelBackend]:
        """Return the kernels that may run the layer and need a check, by name, in static order."""
        built = self._built(decision.takers(self.facts()))
        return {name: backend for name, backend in built.items() if not backend.trusted}

    def usable(self) -> dict[str, KernelBackend]:
        """Return the kernels that may run the layer as far as is known, by name, in static order."""
        return self._built(decision.usable(self.facts(), self.checks, self.backends.settings))

    def would_serve(self, name: str) -> bool:
        """Return whether a kernel would run the layer by the static order if it had passed its check."""
        return decision.would_serve(name, self.facts(), self.checks, self.backends.settings)

    @property
    def checks(self) -> Mapping[str, Checked]:
        """What the self-check found, by kernel; empty before."""
        return self._checks or {}

    def _built(self, names: tuple[str, ...]) -> dict[str, KernelBackend]:
        built = {name: self.backends.get(name) for name in names}
        return {name: backend for name, backend in built.items() if not isinstance(backend, str)}

    def checked(self, checks: dict[str, Checked], shape: LayerShape | None = None) -> None:
        """Keep the results of the self-check, by kernel. They hold for layers of ``shape``; None: for any shape."""
        self._checks, self._checked_for = dict(checks), shape
        self._changed()

    def timed(self, figures: Figures) -> None:
        """Keep what timing found."""
        self._figures = figures
        self._changed()

    @property
    def is_timed(self) -> bool:
        """Whether timing has found figures for it."""
        return self._figures is not None and bool(self._figures.rounds)

    def stop(self, reason: str, code: str = "kernel_shape") -> None:
        """Keep the layer off every kernel of ours from now on."""
        self._stopped = Skip(code, reason)
        self._changed()

    def state(self) -> LayerState:
        """Return what has become of the layer so far.

        Raises:
            UnknownWeightError: the absorbed weight has no format that the kernels know.
        """
        if self.decision.skip is not None:  # whatever has run before
            return LayerState(self.decision, skip=self.decision.skip)
        skip = self.graph_skip or (None if self.ran_kernel else self._batch_skip)
        return LayerState(self.decision, self.ran_kernel, self.possible_kernels or (), skip)

    def reached(self, act: torch.dtype) -> None:
        """Note which kernels may run the layer: its op was called without a batch, with activations of ``act``."""
        self.possible_kernels = ()
        with log.warned(f"{self.name} could not be asked what would run it"):
            if self.why_skipped(act=act) is None:
                self.possible_kernels = self.decision.our_kernels

    def fail(self, error: Exception) -> None:
        """Stop the layer because its kernel raised while it served; correct the status, and log the first such layer.

        The other layers of the model raise next, in the same step and by the same cause.
        """
        reason = f"its kernel has raised: {type(error).__name__}: {error}"
        self.stop(reason, "kernel_failed")
        kept = f"so does each layer whose kernel raises; {GRAPHS_KEEP}"
        line = f"{self.name} runs vLLM's own attention from now on; {kept}: {reason}"
        log.say_once(logging.ERROR, line, key=reason)
        with log.warned("the status could not be corrected"):
            self.engine_status.update({self.name: self.state()})

    def reloaded(self) -> None:
        """Bind and decide again: vLLM may have loaded other strides or memory into the same tensor objects."""
        self._weight, self._bound_with, self._table_and_scale = None, (None, None), (None, None)
        self._dtypes.clear()
        self._changed()

    def _changed(self) -> None:
        self._decision = None
        self._runs.clear()

    # What the ops call in each step.

    @property
    def q_scale(self) -> torch.Tensor:
        """One float32, the dequantisation scale of the query."""
        scale = self._buffers.get("_q_scale")
        return self.module._q_scale if scale is None else scale

    def weight(self) -> absorb.AbsorbWeight:
        """Return W_UK in the format in which vLLM keeps it; read again when vLLM has replaced a tensor.

        Raises:
            UnknownWeightError: the absorbed weight has no format that the kernels know.
        """
        if self._weight is not None:
            for name, tensor in self._tensors:
                if getattr(self.module, name, None) is not tensor:
                    break
            else:
                return self._weight
        tensors = compat_layer.absorb_tensors(self.module)
        self._weight, self._tensors = absorb.read(tensors), tuple(tensors.items())
        return self._weight

    def query_dtype(self, act: torch.dtype) -> torch.dtype:
        """Return what the layer's decode kernel reads where the activations are ``act``: fp8, or ``act``."""
        dtype = self._dtypes.get(act)
        if dtype is None:
            dtype = self._dtypes[act] = compat_layer.prepared_query_dtype(self.module, act)
        return dtype

    def kernel(self, inputs: DecodeInputs) -> Run | None:
        """Return what prepares calls of this shape, or None if vLLM's attention does; count an engaged layer."""
        key = step_key(inputs)
        bound = self._runs.get(key) if self._still_holds(inputs) else None
        if bound is None:
            if len(self._runs) >= _MAX_RUNS:
                self._runs.clear()
            bound = self._runs[key] = self._bind(inputs)
        name, run = bound
        if name:
            self.ran_kernel = name
        return run

    def _bind(self, inputs: DecodeInputs) -> tuple[str, Run | None]:
        """Bind the kernel for calls of this shape.

        Returns:
            The name of the kernel that the layer counts as engaged with, or ""; the function that prepares the calls,
            or None if vLLM's own attention runs them. That is also the result of any error, and one line says why.
        """
        try:
            decided = self.decision
            name = decided.kernel_at(inputs.num_tokens)
            bound = None if name == VLLM else self.backends.bind(name, inputs)
        except Exception as error:
            return self._falls_back(f"no kernel could be chosen: {type(error).__name__}: {error}")
        if decided.skip is not None:
            # A compiled artifact may hold the op although nothing was checked in this process.
            return ("", None) if self._stopped or self._checks is not None else self._falls_back(str(decided.skip))
        if isinstance(bound, str):
            return self._falls_back(f"{name}: {bound}")
        self._batch_skip = None
        return (decided.our_first_kernel, None) if bound is None else (name, bound.run)

    def _falls_back(self, reason: str) -> tuple[str, None]:
        """Log once why batches run vLLM's attention. Reasons that differ in numbers only, as token counts, are one."""
        self._batch_skip = Skip("kernel_shape", reason)
        key = f"left to vLLM: {re.sub(r'[0-9]+', 'N', reason)}"
        log.say_once(logging.ERROR, f"decode batches of some layers run vLLM's own attention: {reason}", key=key)
        return "", None

    def _still_holds(self, inputs: DecodeInputs) -> bool:
        """Return whether the remembered kernels were bound for these tensors; forget them otherwise.

        The rotary table and the cache scale may be other tensors of the same shape, strides and dtype: a contract looks
        at nothing else.
        """
        table, k_scale, same = inputs.cos_sin_cache, inputs.k_scale, True
        if table is not self._table_and_scale[0] or k_scale is not self._table_and_scale[1]:
            before, self._table_and_scale = self._table_and_scale_form, (table, k_scale)
            self._table_and_scale_form = (table.shape, table.stride(), table.dtype, k_scale.shape, k_scale.dtype)
            same = self._table_and_scale_form == before
        if same and inputs.weight is self._bound_with[0] and inputs.q_scale is self._bound_with[1]:
            return True
        self._runs.clear()
        self._bound_with = (inputs.weight, inputs.q_scale)
        return False

    def cache_view(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """Return the layer's cache as the kernels take it, a view that is made once; for another cache bind again."""
        if self._cache() is not kv_cache:
            self._runs.clear()
            # A weak reference: vLLM throws the cache of its profiling away, which must not be kept alive here.
            self._cache, view = weakref.ref(kv_cache, self._forget_view), compat_layer.fp8_view(kv_cache)
            self._view = None if view is kv_cache else view
        return kv_cache if self._view is None else self._view

    def _forget_view(self, _: Any) -> None:
        self._view = None

    def quantise(self, absorbed: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
        """Return [T, N, L] and [T, N, R] as one fp8 [T, N, L+R], quantised by vLLM's kernel."""
        return compat_layer.quantise(self.module, absorbed, q_pe)

    def rope_and_write(
        self, q_pe: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, slots: torch.Tensor, rope: Any
    ) -> None:
        """Rotate q_pe [T, N, R] and k_pe [T, R] in place and write the KV rows, by vLLM's one kernel for it.

        k_pe stays as it is in rows without a slot. ``rope`` is an ``ops.Rope``.
        """
        module = self.module
        compat_layer.rope_and_write(
            rope.positions, q_pe, k_pe, kv_c, rope.table, rope.is_neox, slots, module.kv_cache, module.kv_cache_dtype,
            rope.k_scale,
        )  # fmt: skip

    def rotate(self, q_pe: torch.Tensor, k_pe: torch.Tensor, rope: Any) -> torch.Tensor:
        """Rotate q_pe [T, N, R] in place, and return k_pe [T, 1, R] rotated: in place or not, as flag off does."""
        if rope.rotation == compat_layer.ROTARY_EMB:
            assert self.rotary_emb is not None, "the wrapper that asks for this rotation has set it"
            rotated, k_rotated = self.rotary_emb(rope.positions, q_pe, k_pe)
            if rotated is not q_pe:
                q_pe.copy_(rotated)
            return k_rotated
        # The fused op rotates only together with a KV write, so vLLM's rotary kernel runs in its place.
        op = compat_layer.ROTARY_KERNEL if rope.rotation == compat_layer.FUSED_ROPE else rope.rotation
        compat_layer.rotary_embedding(op, rope.positions, q_pe, k_pe, rope.table, rope.is_neox)
        return k_pe

    def write(self, kv_c: torch.Tensor, k_pe: torch.Tensor, slots: torch.Tensor, metadata: Any, rope: Any) -> None:
        """Write the KV rows of kv_c [T, L] and the rotated k_pe [T, 1, R], as vLLM's own KV update does."""
        module = self.module
        module.update_kv_cache(kv_c, k_pe, module.kv_cache, slots, metadata, module.kv_cache_dtype, rope.k_scale)

    def forward_mqa(self, q_prepared: torch.Tensor, kv_cache: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Attend over the cache with the layer's implementation: q_prepared [n, N or M, L+R] -> [n, N, L]."""
        module, padded = self.module, self.padded
        if padded is None or q_prepared.shape[1] != padded.heads:
            return module.impl.forward_mqa(q_prepared, kv_cache, metadata, module)[0]
        if compat_layer.decodes_unpadded(metadata):
            real = padded.unpad(module.num_heads, q_prepared).contiguous()
            return module.impl.forward_mqa(real, kv_cache, metadata, module)[0]
        attended = padded.impl.forward_mqa(q_prepared, kv_cache, metadata, module)[0]
        return padded.unpad(module.num_heads, attended)

    def v_up(self, attended: torch.Tensor, out: torch.Tensor) -> None:
        """Write the projection of [n, N, L] to ``out`` [n, N*V]."""
        self.module._v_up_proj(attended, out=out)

    def vllm_forward(
        self, q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, metadata: Any, output: torch.Tensor
    ) -> None:
        """Run vLLM's attention of rotated q [T, N, P+R] and k_pe [T, 1, R]; vLLM writes zeros if metadata is None."""
        self.module.forward_impl(q, kv_c, k_pe, self.module.kv_cache, metadata, output=output)
