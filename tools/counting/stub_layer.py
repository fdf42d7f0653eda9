"""An MLA layer of vLLM's own Python over kernels that return at once: what is left is the host's work.

vLLM's ``MLAAttention.forward_impl``, its ops and its forward context run as they are; so do our op, layers, selector
and AITER back end. Replaced are ``torch.bmm``, vLLM's rope and KV kernel, its quantisation, the attention kernels and
AITER's op. Allocations, views and dispatch are real. Scales are buffers of an ``nn.Module`` as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm import _custom_ops
from vllm.config import CUDAGraphMode, PassConfig
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.utils.torch_utils import _encode_layer_name

from vllm_aiter_mla import layers
from vllm_aiter_mla.sandbox import gpu_ops
from vllm_aiter_mla.sandbox.fake_aiter import engine

NAME = "model.layers.0.self_attn.attn"
ROWS = 4
"""Few, so that a buffer comes from malloc's own lists and no page is asked of the kernel."""
HEADS, NOPE, ROPE, LATENT, VALUE, Q_LORA = 16, 128, 64, 512, 128, 1536
ACT = torch.bfloat16


class _Quantise(torch.nn.Module):
    """In the place of vLLM's ``_DecodeConcatQuantFP8``, which is a module too."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._out = [torch.zeros(ROWS, HEADS, LATENT + ROPE).to(dtype)]

    def forward(self, absorbed: torch.Tensor, q_pe: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """A prepared query that is there already."""
        return self._out[0]


class _Implementation:
    is_sparse, dcp_world_size, supports_quant_query_input = False, 1, True

    def __init__(self) -> None:
        self._out = torch.zeros(ROWS, HEADS, LATENT, dtype=ACT), None

    def forward_mqa(self, q: Any, cache: torch.Tensor, metadata: Any, layer: Any) -> Any:
        """An output that is there already, in as many rows as decode."""
        return self._out

    def forward_mha(self, *args: Any, **kwargs: Any) -> None:
        """Prefill attention: nothing."""


class Layer(torch.nn.Module):
    """``MLAAttention`` without its constructor."""

    hisparse_cache = q_pad_num_heads = prefill_backend = sliding_window = None
    use_pcp = dcp_q_replicate = False
    is_aiter_triton_fp4_bmm_enabled = is_aiter_triton_fp8_bmm_enabled = is_amx_bmm_enabled = False
    num_heads, qk_nope_head_dim, qk_rope_head_dim = HEADS, NOPE, ROPE
    kv_lora_rank, v_head_dim = LATENT, VALUE
    layer_name = NAME
    forward_impl, _v_up_proj = MLAAttention.forward_impl, MLAAttention._v_up_proj
    prepare_kv_cache_update = MLAAttention.prepare_kv_cache_update

    def __init__(self, cache: str, fp8: torch.dtype) -> None:
        super().__init__()
        self.kv_cache_dtype, self.impl = cache, _Implementation()
        self.register_buffer("_k_scale", torch.ones(()))
        self.register_buffer("_q_scale", torch.ones(()))
        self.W_UK_T = torch.zeros(HEADS, NOPE, LATENT, dtype=ACT)
        self.W_UV = torch.zeros(HEADS, LATENT, VALUE, dtype=ACT)
        self.kv_cache = torch.zeros(8, 16, LATENT + ROPE, dtype=torch.uint8 if cache == "fp8" else ACT)
        self._decode_concat_quant_fp8_op = _Quantise(fp8)
        self._vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=16),
            compilation_config=SimpleNamespace(pass_config=PassConfig()),
            additional_config={"aiter_mla": {"enabled": True, "kernel": "aiter"}},
        )


def metadata(prefills: int) -> Any:
    """As vLLM's MLA builders make it, of ``ROWS`` rows."""
    return SimpleNamespace(
        decode=SimpleNamespace(),
        prefill=SimpleNamespace() if prefills else None,
        num_prefills=int(prefills > 0),
        num_decodes=ROWS - prefills,
        num_decode_tokens=ROWS - prefills,
        num_actual_tokens=ROWS,
    )


@contextmanager
def calls(cache: str, prefills: int) -> Iterator[dict[str, Callable[[], None]]]:
    """The ops of one layer as a compiled graph calls them, by name, each ready to be timed.

    Args:
        cache: "fp8" or "auto".
        prefills: how many of the rows belong to a prefill.
    """
    gpu_ops.register()
    fp8 = engine.FP8["gfx942"]
    engine.pretend("gfx942")
    layer = Layer(cache, fp8)
    layers.trust(layer)
    context = ForwardContext(
        no_compile_layers={NAME: layer},
        attn_metadata={NAME: metadata(prefills)},
        slot_mapping={NAME: torch.arange(ROWS)},
        cudagraph_runtime_mode=CUDAGraphMode.NONE,
    )
    backend: Any = layers.selector_of(layer).backend("aiter")
    nothing = lambda *args, **kwargs: None  # noqa: E731
    with (
        override_forward_context(context),
        torch.inference_mode(),
        mock.patch.object(torch, "bmm", nothing),
        mock.patch.object(_custom_ops, "concat_and_cache_mla_rope_fused", nothing),
        mock.patch.object(_custom_ops, "rotary_embedding", nothing),
        mock.patch.object(backend, "_op", nothing),
    ):
        yield _calls(layer, fp8 if cache == "fp8" else ACT)
    layers.reset()


def _calls(layer: Layer, out_dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    name = _encode_layer_name(NAME)
    q = torch.zeros(ROWS, HEADS * (NOPE + ROPE), dtype=ACT).view(ROWS, HEADS, NOPE + ROPE)
    k_pe = torch.zeros(ROWS, Q_LORA + LATENT + ROPE, dtype=ACT)[:, Q_LORA + LATENT :]
    kv_c, output = torch.zeros(ROWS, LATENT, dtype=ACT), torch.zeros(ROWS, HEADS * VALUE, dtype=ACT)
    positions, table = torch.arange(ROWS), torch.zeros(1024, ROPE, dtype=ACT)
    q_pe, k_3d, k_scale, cache = q[..., NOPE:], k_pe.unsqueeze(1), layer._k_scale, layer.kv_cache_dtype
    stock, ours = torch.ops.vllm, torch.ops.vllm_aiter_mla
    rope = stock.fused_rope_unified_mla_kv_cache_update.default
    attention = stock.unified_mla_attention_with_output.default
    prepare, attend = ours.fused_qk_rope_kv_cache_q_prep.default, ours.mla_attention_with_prepared_q.default
    query = q.new_zeros((ROWS, HEADS, LATENT + ROPE)).to(out_dtype)
    return {
        "stock rope": lambda: rope(positions, q_pe, k_pe, kv_c, table, False, cache, k_scale, name),
        "stock attention": lambda: attention(q, kv_c, k_3d, output, name),
        "ours prepare": lambda: prepare(q, k_pe, kv_c, positions, table, k_scale, False, out_dtype, name),
        "ours attention": lambda: attend(q, kv_c, k_pe, query, output, name, positions, table, False, False),
    }
