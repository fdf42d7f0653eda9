"""vLLM's forward context and layer as the op bodies take them."""

from __future__ import annotations

from typing import Any

import torch

from vllm_aiter_mla import layers
from vllm_aiter_mla.census import state as census
from vllm_aiter_mla.compat import context, kernels
from vllm_aiter_mla.kernels.absorb import AbsorbWeight
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.ops.bodies import Batch, LayerContext


class VLLMLayer:
    """``bodies.MLALayer`` over vLLM's ``MLAAttention`` module, which it holds as ``module``."""

    __slots__ = ("module", "name")

    def __init__(self, name: str, module: Any) -> None:
        self.name, self.module = name, module

    @property
    def q_scale(self) -> torch.Tensor:
        """See ``MLALayer.q_scale``; likewise the methods below."""
        scale: torch.Tensor = self.module._q_scale
        return scale

    def weight(self) -> AbsorbWeight:
        """Returns the weight in the form in which vLLM keeps it."""
        return layers.weight_of(self.module)

    def prepare(self, inputs: DecodeInputs) -> torch.Tensor:
        """Runs the back end that was chosen for the layer. Raises NoKernelError."""
        return layers.prepare(self.name, self.module, inputs)

    def quantise(self, absorbed: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
        """Quantises with vLLM's kernel."""
        quantised: torch.Tensor = self.module._decode_concat_quant_fp8_op(absorbed, q_pe, self.q_scale)
        return quantised

    def rotate(
        self, q_pe: torch.Tensor, k_pe: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, is_neox: bool
    ) -> None:
        """Rotates with vLLM's rotary kernel."""
        kernels.rotary_embedding(positions, q_pe, k_pe, table, is_neox)

    def forward_mqa(self, q_prepared: torch.Tensor, kv_cache: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Attends with the layer's attention implementation."""
        attended: torch.Tensor = self.module.impl.forward_mqa(q_prepared, kv_cache, metadata, self.module)[0]
        return attended

    def v_up(self, attended: torch.Tensor, out: torch.Tensor) -> None:
        """Projects with vLLM's own projection."""
        self.module._v_up_proj(attended, out=out)

    def stock_forward(
        self, q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, metadata: Any, output: torch.Tensor
    ) -> None:
        """Calls ``forward_impl``, which takes the cache as vLLM stores it."""
        self.module.forward_impl(q, kv_c, k_pe, self.module.kv_cache, metadata, output=output)


NO_BATCH = Batch(metadata=None, num_actual_tokens=0, decode_only=False)


def layer_context(layer_name: Any) -> LayerContext:
    """The context of the layer that an op was given by name."""
    return _context(context.layer_call(layer_name))


def layer_and_batch(layer_name: Any) -> tuple[LayerContext, Batch]:
    """As ``layer_context``, with what is known of the batch: for the attention op alone."""
    call = context.layer_call(layer_name)
    metadata = call.metadata
    if metadata is None:
        return _context(call), NO_BATCH
    decode_only = context.is_decode_only(metadata, call.slots)
    return _context(call), Batch(metadata, metadata.num_actual_tokens, decode_only)


def note_while_profiling(ctx: LayerContext, *, is_neox: bool, act: torch.dtype) -> None:
    """Count the layer as engaged while vLLM profiles memory, with the kernel that its calls will run on."""
    assert isinstance(ctx.layer, VLLMLayer)
    kernel = layers.decide(ctx.layer.module, is_neox=is_neox, act=act).kernel
    if kernel is not None:  # else the first call with a cache raises, with every back end's reason
        census.engage(ctx.name, kernel)


def _context(call: context.LayerCall) -> LayerContext:
    return LayerContext(call.name, VLLMLayer(call.name, call.module), call.kv_cache, call.slots, call.is_piecewise)
