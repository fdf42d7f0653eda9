"""One MLA layer in vLLM's own Python without an engine: its ops and ours, to be counted or timed.

vLLM's ``MLAAttention.forward_impl``, its ops and its forward context run as they are; so do our op, layers, selector
and AITER back end. The attention kernels return at once on every side. For timing, ``without_kernels`` also
replaces ``torch.bmm``, vLLM's rotary kernels and AITER's op: allocations, views and dispatch stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm import _custom_ops
from vllm.compilation.passes.fusion import mla_rope_kvcache_cat_fusion  # noqa: F401  defines vLLM's own fused op
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, PassConfig
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor import custom_op
from vllm.model_executor.layers.attention.mla_attention import MLAAttention, _DecodeConcatQuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.platforms import current_platform
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backends.mla.rocm_aiter_mla import AiterMLAHelper

from tests.passes.stubs import Batch
from tests.sandbox import gpu_ops
from tests.sandbox.simulated_aiter import ROCM, install
from tools import aot, triton_driver
from vllm_aiter_mla.compat.layer import FUSED_ROPE, ROTARY_KERNEL
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.serving import backends, ops
from vllm_aiter_mla.serving.decision import PASSED
from vllm_aiter_mla.serving.layer import Layer

ARCH, NAME = "gfx950", "model.layers.0.self_attn.attn"
ROWS = 4
"""Few, so that a buffer comes from malloc's own lists and no page is asked of the kernel."""
HEADS, NOPE, ROPE, LATENT, VALUE, Q_LORA = 16, 128, 64, 512, 128, 1536
ACT = torch.bfloat16


def quantiser() -> Any:
    """Return vLLM's own concat and quantisation, compiled by torch.compile as with Inductor, its kernel stubbed.

    Dynamo's guards and vLLM's wrapper around it are the host's work; the kernel's output is allocated in every call.
    """

    def backend(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        known: list[torch.Tensor] = []

        def launch(*args: Any) -> Any:
            if not known:
                known.extend(graph(*args))
            return [out.new_empty(out.shape) for out in known]

        return launch

    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, backend="inductor", custom_ops=["none"])
    with (
        mock.patch.object(custom_op, "get_cached_compilation_config", return_value=compilation),
        mock.patch.object(type(current_platform), "simple_compile_backend", staticmethod(backend)),
        mock.patch.object(custom_op, "maybe_disable_graph_partition", return_value={}),
    ):
        return _DecodeConcatQuantFP8(static=True, group_shape=GroupShape.PER_TENSOR, compile_native=True)


class _Implementation:
    is_sparse, dcp_world_size, supports_quant_query_input = False, 1, True

    def __init__(self, heads: int) -> None:
        self.num_heads = heads
        self._out = torch.zeros(ROWS, AiterMLAHelper.get_actual_mla_num_heads(heads), LATENT, dtype=ACT)

    def forward_mqa(self, q: Any, cache: torch.Tensor, metadata: Any, layer: Any) -> Any:
        """Return an output that exists already. Join and pad the query first, as ``AiterMLAImpl`` does."""
        joined = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        out = self.decode(AiterMLAHelper.get_mla_padded_q(self.num_heads, joined))
        return AiterMLAHelper.get_mla_unpadded_o(self.num_heads, out), None

    def decode(self, q: torch.Tensor) -> torch.Tensor:
        """Do nothing for the decode kernel."""
        return self._out[: q.shape[0]]

    def forward_mha(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing for prefill attention."""

    def do_kv_cache_update(
        self, kv_c: torch.Tensor, k_pe: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, name: str, scale: Any
    ) -> None:
        """Do what ``concat_and_cache_mla`` does on a GPU."""
        gpu_ops.write_kv_rows(kv_c, k_pe, cache, slots, scale)


class StubLayer(torch.nn.Module):
    """``MLAAttention`` without its constructor."""

    hisparse_cache = q_pad_num_heads = prefill_backend = sliding_window = None
    use_pcp = dcp_q_replicate = pcp_shard_decode_requests = False
    is_aiter_triton_fp4_bmm_enabled = is_aiter_triton_fp8_bmm_enabled = is_amx_bmm_enabled = False
    qk_nope_head_dim, qk_rope_head_dim = NOPE, ROPE
    kv_lora_rank, v_head_dim = LATENT, VALUE
    layer_name = NAME
    forward_impl, _v_up_proj = MLAAttention.forward_impl, MLAAttention._v_up_proj
    prepare_kv_cache_update = MLAAttention.prepare_kv_cache_update
    update_kv_cache = MLAAttention.update_kv_cache
    chunked_prefill_workspace_size = 0

    def __init__(self, cache: str, heads: int, kernel: str) -> None:
        super().__init__()
        self.kv_cache_dtype, self.num_heads, self.impl = cache, heads, _Implementation(heads)
        self.register_buffer("_k_scale", torch.ones(()))
        self.register_buffer("_q_scale", torch.ones(()))
        self.W_UK_T = torch.zeros(heads, NOPE, LATENT, dtype=ACT)
        self.W_UV = torch.zeros(heads, LATENT, VALUE, dtype=ACT)
        self.kv_cache = torch.zeros(8, 16, LATENT + ROPE, dtype=torch.uint8 if cache == "fp8" else ACT)
        self._decode_concat_quant_fp8_op = quantiser()
        self._vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace()),
            cache_config=SimpleNamespace(block_size=16),
            compilation_config=SimpleNamespace(pass_config=PassConfig()),
            additional_config={"aiter_mla": {"enabled": True, "kernel": kernel}},
        )


# Rows of each sort among ``ROWS``, the rest pads a graph; and the heads of the layer. No metadata in a dummy run.
BATCHES = {
    "all decode": (Batch("", ROWS, decodes=ROWS), HEADS),
    "all decode, 20 heads": (Batch("", ROWS, decodes=ROWS), 20),
    "padded decode": (Batch("", ROWS, decodes=ROWS - 1), HEADS),
    "one prefill among decodes": (Batch("", ROWS, decodes=ROWS - 1, prefills=1), HEADS),
    "all short prompts": (Batch("", ROWS, prefills=ROWS), HEADS),
    "dummy": (Batch("", ROWS, profiling=True), HEADS),
}


@contextmanager
def step(cache: str, kind: str, kernel: str = "aiter") -> Iterator[StubLayer]:
    """Yield one layer in the forward context of a batch of ``BATCHES``, on a card that the plugin takes for gfx950.

    ``cache`` is "fp8" or "auto", ``kernel`` one of the plugin's option of that name. The card's fp8 type is that of a
    CPU too, so vLLM's platform stays as it is.
    """
    gpu_ops.register()
    ops.register()
    batch, heads = BATCHES[kind]
    layer = StubLayer(cache, heads, kernel)
    context = ForwardContext(
        no_compile_layers={NAME: layer},
        attn_metadata=None if batch.profiling else {NAME: batch.metadata()},
        slot_mapping={} if batch.profiling else {NAME: batch.slot_mapping()},
        cudagraph_runtime_mode=CUDAGraphMode.NONE,
    )
    with (
        triton_card() if kernel == "triton" else nullcontext(),
        install(ARCH),
        mock.patch.object(backends, "detect_platform", return_value=Platform(ARCH, ROCM)),
        mock.patch.object(Layer, "not_admitted", return_value=None),  # the stub lacks what only admission reads
        override_forward_context(context),
        torch.inference_mode(),
    ):
        Layer.of(layer).checked(dict.fromkeys(Layer.of(layer).backends.names, PASSED))
        yield layer


@contextmanager
def without_kernels(layer: StubLayer) -> Iterator[None]:
    """Stub the kernels, so that only the host's work is left; that of a Triton kernel up to the C launch."""
    backends, nothing = Layer.of(layer).backends, lambda *args, **kwargs: None
    ours = mock.patch.object(backends.get("aiter"), "_op", nothing) if "aiter" in backends.names else nullcontext()
    with (
        ours,
        mock.patch.object(torch, "bmm", nothing),
        mock.patch.object(torch, "cat", _joined),
        mock.patch.object(_custom_ops, "concat_and_cache_mla_rope_fused", nothing),
        mock.patch.object(_custom_ops, "rotary_embedding", nothing),
        mock.patch.object(layer.impl, "do_kv_cache_update", nothing),
    ):
        yield


@contextmanager
def triton_card() -> Iterator[None]:
    """Let the Triton back end take the CPU for a gfx950, and stop before HIP's launch."""
    from vllm_aiter_mla.kernels.triton import backend

    with (
        mock.patch.dict(backends.FACTORIES, {"triton": lambda platform, settings: backend.TritonBackend()}),
        mock.patch.object(backend, "interpreted", return_value=True),
        mock.patch.object(backend.TritonBackend, "arch", ARCH),
        triton_driver.installed(aot.TARGETS[ARCH], lambda *args: None),
    ):
        yield


def _joined(tensors: Any, dim: int) -> torch.Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return tensors[0].new_empty(shape)


def calls(layer: StubLayer) -> dict[str, Callable[[], Any]]:
    """Return the ops of the layer as a compiled graph calls them, by name."""
    name, heads = _encode_layer_name(NAME), layer.num_heads
    q = torch.zeros(ROWS, heads * (NOPE + ROPE), dtype=ACT).view(ROWS, heads, NOPE + ROPE)
    k_pe = torch.zeros(ROWS, Q_LORA + LATENT + ROPE, dtype=ACT)[:, Q_LORA + LATENT :]
    kv_c, output = torch.zeros(ROWS, LATENT, dtype=ACT), torch.zeros(ROWS, heads * VALUE, dtype=ACT)
    positions, table = torch.arange(ROWS), torch.zeros(1024, ROPE, dtype=ACT)
    q_pe, k_3d, k_scale, cache = q[..., NOPE:], k_pe.unsqueeze(1), layer._k_scale, layer.kv_cache_dtype
    vllm = torch.ops.vllm
    rotary = torch.ops._C.rotary_embedding.default
    write = vllm.unified_mla_kv_cache_update.default
    fused = vllm.fused_rope_unified_mla_kv_cache_update.default
    attention = vllm.unified_mla_attention_with_output.default
    ours = torch.ops.vllm_aiter_mla.mla_attention_with_rope.default
    return {
        "rope": lambda: rotary(positions, q_pe, k_pe, ROPE, table, False),
        "write": lambda: write(kv_c, k_3d, name, cache, k_scale),
        "rope and write": lambda: fused(positions, q_pe, k_pe, kv_c, table, False, cache, k_scale, name),
        "attention": lambda: attention(q, kv_c, k_3d, output, name),
        **{
            called: lambda rotation=rotation: ours(
                q, k_pe, kv_c, positions, table, k_scale, output, False, rotation, name
            )
            for called, rotation in (("ours", ROTARY_KERNEL), ("ours, fused", FUSED_ROPE))
        },
    }
