"""vLLM's forward context and layer as the op bodies take them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from vllm_aiter_mla import layers
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.compat import layer as context
from vllm_aiter_mla.compat import layer as kernels
from vllm_aiter_mla.kernels.absorb import AbsorbWeight
from vllm_aiter_mla.kernels.backend import Run
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.ops.bodies import LayerStep
from vllm_aiter_mla.status import state as status

_ADAPTER = "_aiter_mla_adapter"
_KEEP = 4096  # call shapes that a layer remembers; more than the token counts of any decode limit


class VLLMLayer:
    """``bodies.MLALayer`` over vLLM's ``MLAAttention`` module, of which there is one of these.

    What follows from the layer and the shape of a call is found once and remembered. Weights, scales and the cache are
    read per call, because vLLM replaces them: where one of them is another tensor than before, all is found anew.
    """

    def __init__(self, name: str, module: Any) -> None:
        self.name, self.module = name, module
        self.limit = layers.limit_of(module)
        self._buffers = getattr(module, "_buffers", {})  # a look-up through the module takes ten times as long
        self._weight: AbsorbWeight | None = None
        self._tensors: tuple[tuple[str, torch.Tensor], ...] = ()
        self._dtypes: dict[torch.dtype, torch.dtype] = {}
        self._runs: dict[tuple[Any, ...], tuple[str, Run | None]] = {}
        self._lasting: tuple[Any, Any] = (None, None)
        self._constants: tuple[Any, Any] = (None, None)
        self._described: tuple[Any, ...] = ()
        self._generation = -1
        self._cache: Callable[[], torch.Tensor | None] = lambda: None
        self._view: torch.Tensor | None = None

    @property
    def q_scale(self) -> torch.Tensor:
        """See ``MLALayer.q_scale``; likewise the methods below."""
        scale = self._buffers.get("_q_scale")
        return self.module._q_scale if scale is None else scale

    def weight(self) -> AbsorbWeight:
        """Returns the weight in the form in which vLLM keeps it."""
        if self._weight is not None:
            for name, tensor in self._tensors:
                if getattr(self.module, name, None) is not tensor:
                    break
            else:
                return self._weight
        self._tensors = tuple(compat_layer.absorb_tensors(self.module).items())
        self._weight = layers.weight_of(self.module)
        return self._weight

    def query_dtype(self, act: torch.dtype) -> torch.dtype:
        """By the same test as in vLLM."""
        found = self._dtypes.get(act)
        if found is None:
            found = self._dtypes[act] = compat_layer.prepared_query_dtype(self.module, act)
        return found

    def kernel(self, inputs: DecodeInputs) -> Run | None:
        """Returns what was chosen for the layer and this shape of a call, and counts the layer as engaged."""
        key = _step_key(inputs)
        found = self._runs.get(key) if self._still_holds(inputs) else None
        if found is None:
            if len(self._runs) >= _KEEP:
                self._runs.clear()
            found = self._runs[key] = layers.kernel_for(self.module, inputs)
        status.engage(self.name, found[0])
        return found[1]

    def _still_holds(self, inputs: DecodeInputs) -> bool:
        """Whether what is remembered was found for these tensors and these decisions; it is forgotten otherwise."""
        generation, same = layers.generation(), self._same_constants(inputs)
        if (
            same
            and generation == self._generation
            and inputs.weight is self._lasting[0]
            and inputs.q_scale is self._lasting[1]
        ):
            return True
        self._runs.clear()
        self._lasting, self._generation = (inputs.weight, inputs.q_scale), generation
        return False

    def _same_constants(self, inputs: DecodeInputs) -> bool:
        """Whether rotary table and cache scale are as before in what a contract looks at; other tensors may be."""
        table, k_scale = inputs.cos_sin_cache, inputs.k_scale
        if table is self._constants[0] and k_scale is self._constants[1]:
            return True
        before, self._constants = self._described, (table, k_scale)
        self._described = (table.shape, table.stride(), table.dtype, k_scale.shape, k_scale.dtype)
        return self._described == before

    def cache_view(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The layer's cache as the kernels take it, made once per cache; what was found for another is forgotten."""
        if self._cache() is not kv_cache:
            self._runs.clear()
            # What vLLM throws away after profiling must not be kept alive from here.
            self._cache, view = weakref.ref(kv_cache, self._forget_view), context.fp8_view(kv_cache)
            self._view = None if view is kv_cache else view
        return kv_cache if self._view is None else self._view

    def _forget_view(self, _: Any) -> None:
        self._view = None

    def give_up(self, error: Exception) -> None:
        """Likewise."""
        layers.give_up(self.module, error)

    def quantise(self, absorbed: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
        """Quantises with vLLM's kernel."""
        return compat_layer.quantise(self.module, absorbed, q_pe)

    def rope_and_write(
        self,
        q_pe: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor,
        k_scale: torch.Tensor,
        is_neox: bool,
    ) -> None:
        """Calls the kernel of vLLM's own fusion, with the cache as vLLM stores it."""
        module = self.module
        kernels.rope_and_write(
            positions, q_pe, k_pe, kv_c, table, is_neox, slots, module.kv_cache, module.kv_cache_dtype, k_scale
        )

    def rotate(
        self, q_pe: torch.Tensor, k_pe: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, is_neox: bool
    ) -> None:
        """Rotates with vLLM's rotary kernel."""
        kernels.rotary_embedding(positions, q_pe, k_pe, table, is_neox)

    def forward_mqa(self, q_prepared: torch.Tensor, kv_cache: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Attends with the layer's attention implementation."""
        module = self.module
        attended: torch.Tensor = module.impl.forward_mqa(q_prepared, kv_cache, metadata, module)[0]
        return attended

    def v_up(self, attended: torch.Tensor, out: torch.Tensor) -> None:
        """Projects with vLLM's own projection."""
        self.module._v_up_proj(attended, out=out)

    def vllm_forward(
        self, q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, metadata: Any, output: torch.Tensor
    ) -> None:
        """Calls ``forward_impl``, which takes the cache as vLLM stores it."""
        module = self.module
        module.forward_impl(q, kv_c, k_pe, module.kv_cache, metadata, output=output)


def layer_of(layer_name: Any) -> VLLMLayer:
    """A layer by its name, for an op that may be inside a piecewise graph: it must not look at the batch."""
    return _adapter(*context.layer_module(layer_name))


def layer_step(layer_name: Any) -> LayerStep:
    """One layer in the current step, for an op that was given it by name."""
    name, metadata, module, kv_cache, slots = context.layer_call(layer_name)
    layer = _adapter(name, module)
    if metadata is None:
        return LayerStep(name, layer, kv_cache, slots, None, 0, False, context.is_piecewise)
    rows = metadata.num_actual_tokens
    decode_only = rows <= layer.limit and context.is_decode_only(metadata, slots) and kv_cache.numel() > 0
    if decode_only:
        kv_cache = layer.cache_view(kv_cache)
    return LayerStep(name, layer, kv_cache, slots, metadata, rows, decode_only, context.is_piecewise)


def note_while_profiling(step: LayerStep, *, is_neox: bool, act: torch.dtype) -> None:
    """Count the layer as engaged while vLLM profiles memory, with the kernel that its calls will run on."""
    assert isinstance(step.layer, VLLMLayer)
    kernel = layers.decide(step.layer.module, is_neox=is_neox, act=act).kernel
    if kernel is not None:
        status.engage(step.name, kernel)


def _adapter(name: str, module: Any) -> VLLMLayer:
    # Kept by the module itself, so that the two go together.
    layer: VLLMLayer | None = module.__dict__.get(_ADAPTER)
    if layer is None:
        layer = module.__dict__[_ADAPTER] = VLLMLayer(name, module)
    return layer


def _step_key(inputs: DecodeInputs) -> tuple[Any, ...]:
    """All that a kernel's contract looks at in the rows of a step."""
    q, k_pe, kv_c, slots = inputs.q, inputs.k_pe, inputs.kv_c, inputs.slot_mapping
    positions = inputs.positions
    return (
        q.shape, q.stride(), q.storage_offset(), q.dtype, k_pe.shape, k_pe.stride(), k_pe.storage_offset(), k_pe.dtype,
        kv_c.shape, kv_c.stride(), kv_c.storage_offset(), kv_c.dtype, positions.shape, positions.stride(),
        positions.dtype, slots.shape, slots.stride(), slots.dtype, inputs.is_neox, inputs.out_dtype,
    )  # fmt: skip
