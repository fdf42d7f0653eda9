# SPDX-License-Identifier: Apache-2.0
"""vLLM's ``MLAAttention`` layer: its facts for admission, its kernels, the forward context."""

import copy
import functools
import operator
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch

from vllm_aiter_mla.admission import LayerView
from vllm_aiter_mla.compat.custom_op import attention_hooks

# -- facts of a layer

KNOWN_IMPLS = {"AiterMLAImpl"}
"""Class names of the attention implementations that the fast path calls correctly; the sandbox adds its own."""
ATTRIBUTES = (
    "layer_name", "kv_cache", "kv_cache_dtype", "num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank",
    "v_head_dim", "sliding_window", "q_pad_num_heads", "hisparse_cache", "use_pcp", "dcp_q_replicate",
    "is_aiter_triton_fp4_bmm_enabled", "is_aiter_triton_fp8_bmm_enabled", "is_amx_bmm_enabled", "_vllm_config",
    "_q_scale", "_k_scale", "_decode_concat_quant_fp8_op", "_v_up_proj", "forward_impl", "update_kv_cache",
    "impl.forward_mqa",
    "attn_backend.get_builder_cls", "get_kv_cache_spec",
    "impl.is_sparse", "impl.dcp_world_size", "impl.supports_quant_query_input",
)  # fmt: skip
"""Attributes and methods that ``MLAAttention`` and its implementation always have in vLLM 0.30, 0.31, 0.32 and 0.33.

Serving calls some of them where no error can be caught, so a layer that lacks one does not engage.
"""

KNOWN_LAYERS = {"MLAAttention"}
"""Class names of the layers whose ``forward_impl`` does the same for decode rows as the plugin's ops."""


def layer_view(
    layer: Any, cos_sin_dtype: torch.dtype | None = None, graph_dtype: torch.dtype | None = None
) -> LayerView:
    """Return the facts that admission decides on. If the layer lacks an attribute, only that is reported.

    Args:
        layer: the attention module, its weights loaded.
        cos_sin_dtype: dtype of the rotary table, if the graph shows it.
        graph_dtype: activation dtype of the graph, if there is one.
    """
    missing = tuple(name for name in ATTRIBUTES if not _has(layer, name))
    if missing:
        return LayerView(missing_names=missing)
    impl, cache, config, act = layer.impl, layer.kv_cache, config_of(layer), activation_dtype(layer)
    builder = layer.attn_backend.get_builder_cls()
    return LayerView(
        impl=type(impl).__name__,
        known_impls=frozenset(KNOWN_IMPLS),
        forward_origin=_own_forward(layer),
        is_sparse=bool(impl.is_sparse),
        q_pad_num_heads=layer.q_pad_num_heads,
        has_absorbed_weight=all(isinstance(getattr(layer, name, None), torch.Tensor) for name in _weight_names(layer)),
        has_amx_bmm=bool(layer.is_amx_bmm_enabled),
        has_rope_kernel=has_rope_and_write(),
        kv_cache_dtype=layer.kv_cache_dtype,
        model_dtype=str(act).removeprefix("torch.") if act is not None else "",
        kv_cache_ndim=cache.dim() if isinstance(cache, torch.Tensor) and cache.numel() else None,
        cudagraph_support=str(builder.get_cudagraph_support(config, layer.get_kv_cache_spec(config)).name),
        dcp=int(impl.dcp_world_size),
        pcp=2 if layer.use_pcp else 1,
        dcp_q_replicate=bool(layer.dcp_q_replicate),
        has_hisparse=layer.hisparse_cache is not None,
        graph_dtype="" if graph_dtype in (None, act) else str(graph_dtype).removeprefix("torch."),
        cos_sin_dtype_matches=cos_sin_dtype is None or act is None or cos_sin_dtype == act,
        has_sliding_window=layer.sliding_window is not None,
        is_query_scaled=getattr(config.model_config.hf_text_config, "llama_4_scaling", None) is not None,
        num_heads=layer.num_heads,
        qk_nope_head_dim=layer.qk_nope_head_dim,
        qk_rope_head_dim=layer.qk_rope_head_dim,
        kv_lora_rank=layer.kv_lora_rank,
        v_head_dim=layer.v_head_dim,
    )


def activation_dtype(layer: Any) -> torch.dtype | None:
    """Return the dtype the layer computes in: its absorbed weight's, or the model's if the weight is quantised."""
    if has_quantised_weight(layer):
        dtype = layer._vllm_config.model_config.dtype
        return dtype if isinstance(dtype, torch.dtype) else None
    weight = getattr(layer, "W_UK_T", None)
    return weight.dtype if isinstance(weight, torch.Tensor) else None


def has_quantised_weight(layer: Any) -> bool:
    """Return whether vLLM holds the absorbed weight as ``W_K`` and ``W_K_scale``, in mxfp4 or fp8."""
    return bool(layer.is_aiter_triton_fp4_bmm_enabled or layer.is_aiter_triton_fp8_bmm_enabled)


def prepared_query_dtype(layer: Any, act: torch.dtype) -> torch.dtype:
    """Return the query dtype that the layer's decode kernel reads.

    It is fp8 if the cache is fp8 and the implementation takes a quantised query, else ``act``: the same test as in
    vLLM's ``MLAAttention.forward_impl``.
    """
    quantised = layer.kv_cache_dtype.startswith("fp8") and bool(layer.impl.supports_quant_query_input)
    return fp8_dtype() if quantised else act


def quantise(layer: Any, absorbed: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
    """Concatenate absorbed [T, N, L] and q_pe [T, N, R] in fp8, with the layer's own function."""
    return layer._decode_concat_quant_fp8_op(absorbed, q_pe, layer._q_scale)


def absorb_tensors(layer: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of W_UK by vLLM's names. Read them per call: reloading the model replaces them."""
    return {name: getattr(layer, name) for name in _weight_names(layer)}


def _weight_names(layer: Any) -> tuple[str, ...]:
    """Return vLLM's names of the tensors that hold W_UK."""
    return ("W_K", "W_K_scale") if has_quantised_weight(layer) else ("W_UK_T",)


def _own_forward(layer: Any) -> str:
    """Return which class overrides ``forward_impl``: "the instance" if it is set there, "" if none does."""
    if "forward_impl" in vars(layer):
        return "the instance"
    owner = next((cls.__name__ for cls in type(layer).__mro__ if "forward_impl" in vars(cls)), "nobody")
    return "" if owner in KNOWN_LAYERS else owner


def _has(layer: Any, path: str) -> bool:
    """Return whether the layer has an attribute of ``ATTRIBUTES``."""
    *owner, name = path.split(".")
    return hasattr(getattr(layer, owner[0], None) if owner else layer, name)


def config_of(layer: Any) -> Any:
    """Return the ``VllmConfig`` of the layer's engine."""
    return layer._vllm_config


def is_nope(layer: Any) -> bool:
    """Return whether the config says that the model's MLA rotates nothing: Kimi-Linear, Kimi-K3."""
    return bool(getattr(config_of(layer).model_config.hf_text_config, "mla_use_nope", False))


def rounds_once(layer: Any) -> bool:
    """Return whether Inductor compiles the layer's forward, and so rounds an expression of 16-bit values once."""
    compilation = config_of(layer).compilation_config
    is_compiled = compilation.mode is not None and compilation.mode.name != "NONE"
    return bool(is_compiled and compilation.backend == "inductor" and not emulates_casts(layer))


def emulates_casts(layer: Any) -> bool:
    """Return whether the user lets Inductor round after each operation, as eager code does."""
    return bool(config_of(layer).compilation_config.inductor_compile_config.get("emulate_precision_casts"))


def block_size(layer: Any) -> int:
    """Return the tokens in a block of the layer's KV cache, 16 if vLLM has not decided yet."""
    return int(config_of(layer).cache_config.block_size or 16)


# -- head counts that the decode kernel does not take


class PaddedHeads(NamedTuple):
    """How to decode a query that a kernel has laid out for more heads than the layer has, so that vLLM copies none."""

    heads: int  # M, the number to which vLLM's helper would pad the query
    impl: Any  # the layer's implementation, as it is for a layer of M heads
    # vLLM's own function, which takes N and [n, M, L] and returns the layer's heads [n, N, L], a view
    unpad: Callable[[int, torch.Tensor], torch.Tensor]


def padded_heads(layer: Any) -> PaddedHeads | None:
    """Return how to decode padded heads; None if vLLM pads none here, or pads in a way that is not known.

    AITER's decode kernel takes multiples of 16 heads, and vLLM copies a query of any other number in every step. For
    gfx950's Gluon kernel it copies nothing.
    """
    helper = _padding_helper(layer)
    if helper is None:
        return None
    impl, heads = layer.impl, layer.num_heads
    padded = int(helper.get_actual_mla_num_heads(heads))
    if (
        padded == heads
        or not _pads_as_known(helper, heads, padded)
        or impl.num_heads != heads
        or impl.dcp_world_size != 1
    ):
        return None
    wide = copy.copy(impl)
    wide.num_heads = padded
    return PaddedHeads(padded, wide, helper.get_mla_unpadded_o)


def _pads_as_known(helper: Any, heads: int, padded: int) -> bool:
    """Return whether vLLM repeats each head where that fills them, else appends; and copies no query of full heads.

    vLLM's functions are tried on the numbers of the heads, in numpy: they only slice, and a torch tensor would be
    traced where a graph is being compiled.
    """
    columns = numpy.arange(padded)[None, :, None]
    step = padded // heads if padded % heads == 0 else 1
    kept = list(helper.get_mla_unpadded_o(heads, columns).flat)
    return helper.get_mla_padded_q(padded, columns) is columns and kept == list(range(0, heads * step, step))


def decodes_unpadded(metadata: Any) -> bool:
    """Return whether a batch goes to a decode kernel that takes the query unpadded."""
    decode = metadata.decode
    return bool(getattr(decode, "use_gluon_decode", False) or getattr(decode, "use_gluon_verify", False))


def pad_query(layer: Any, q: torch.Tensor) -> torch.Tensor:
    """Return q [T, N, L+R] padded as vLLM would: for timing."""
    return _padding_helper(layer).get_mla_padded_q(layer.num_heads, q)


def padding_helper() -> Any:
    """Return vLLM's helper that pads heads for AITER's decode kernels, or None: for timing without a layer."""
    try:
        from vllm.v1.attention.backends.mla.rocm_aiter_mla import AiterMLAHelper
    except ImportError:  # another release of vLLM
        return None
    return AiterMLAHelper


def _padding_helper(layer: Any) -> Any:
    """Return the helper that pads heads for the layer's implementation, or None if it pads none."""
    decode = getattr(type(getattr(layer, "impl", None)), "forward_mqa", None)
    return getattr(sys.modules.get(getattr(decode, "__module__", "")), "AiterMLAHelper", None)


# -- vLLM's own kernels, as its MLA layer calls them


ROTARY_KERNEL = "_C::rotary_embedding"
"""vLLM's rotary kernel. It computes in float32 and rounds once, as code does that Inductor generates from a RoPE."""
FUSED_ROPE = "vllm::fused_rope_unified_mla_kv_cache_update"
"""RoPE and KV write that vLLM's own pass puts into a graph. Its kernel is the one of ``rope_and_write``."""
ROTARY_EMB = "rotary_emb"
"""Takes the place of an op's name for the layer's own rotary module, which a model runs eagerly or as a custom op."""


def rotary_embedding(
    op: str,
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    k_pe: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotate q_pe [T, N, R] and k_pe [T, 1, R] in place, any strides of rows and heads, in one launch.

    ``op`` names the kernel: ``ROTARY_KERNEL``, or another op with the same arguments.
    """
    rotate = _ops().rotary_embedding if op == ROTARY_KERNEL else _op_named(op)
    rotate(positions, q_pe, k_pe, k_pe.shape[-1], cos_sin_cache, is_neox)


def _op_named(name: str) -> Any:
    return functools.reduce(getattr, name.split("::"), torch.ops)


def has_rope_and_write() -> bool:
    """Return whether this build of vLLM has the kernel that ``rope_and_write`` calls."""
    return hasattr(getattr(torch.ops, "_C_cache_ops", None), "concat_and_cache_mla_rope_fused")


def rope_and_write(
    positions: torch.Tensor, q_pe: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, cos_sin_cache: torch.Tensor,
    is_neox: bool, slots: torch.Tensor, kv_cache: torch.Tensor, kv_cache_dtype: str, k_scale: torch.Tensor,
) -> None:  # fmt: skip
    """Rotate q_pe [T, N, R] and k_pe [T, R] in place and write the KV rows, in one launch.

    Operands are those of ``DecodeInputs``, but for a slot for each row, an fp8 cache as uint8, and its dtype in vLLM's
    spelling. Each product and each sum of the rotation is rounded to the dtype of q_pe. A row without a slot keeps its
    k_pe.
    """
    _ops().concat_and_cache_mla_rope_fused(
        positions, q_pe, k_pe, kv_c, cos_sin_cache, is_neox, slots, kv_cache, kv_cache_dtype, k_scale
    )


def absorb_products() -> dict[str, Callable[..., torch.Tensor]]:
    """Return vLLM's calls of AITER's batched GEMMs, by weight format. Nothing is imported until one is called."""
    return {
        "fp8": lambda *operands, **options: _aiter_ops().triton_fp8_bmm(*operands, **options),
        "mxfp4": lambda *operands, **options: _aiter_ops().batched_gemm_a16wfp4(*operands, **options),
    }


def concat_quantise_fp8(absorbed: torch.Tensor, q_pe: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Concatenate absorbed [T, N, L] and q_pe [T, N, R] in the platform's fp8 type, divided by ``scale``, one float32.

    Does what vLLM's layers of the current ``VllmConfig`` do: by default one kernel that Inductor generates.

    Raises:
        AssertionError: vLLM has no current config (``set_current_vllm_config``).
    """
    compilation = _current_config()().compilation_config
    return _concat_quantiser(compilation.mode, compilation.backend, *compilation.custom_ops)(absorbed, q_pe, scale)


@functools.cache
def _current_config() -> Callable[[], Any]:
    """Return vLLM's function; imported once, because the call is timed."""
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config


@functools.lru_cache(maxsize=8)
def _concat_quantiser(*_: Any) -> Any:
    """Build the same concat + quantise function as ``MLAAttention.__init__``.

    It is a separate instance, so timing it does not change what vLLM compiles for the layer. The arguments are the
    cache key: mode, back end and custom ops of the config decide which function vLLM builds.
    """
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    return mla_attention._DecodeConcatQuantFP8(static=True, group_shape=GroupShape.PER_TENSOR, compile_native=True)


def fp8_dtype() -> torch.dtype:
    """Return the platform's fp8 type."""
    from vllm.platforms import current_platform

    return current_platform.fp8_dtype()


@functools.cache
def _aiter_ops() -> Any:
    from vllm._aiter_ops import rocm_aiter_ops

    return rocm_aiter_ops


@functools.cache
def _ops() -> Any:
    """Return vLLM's wrappers of its kernels. An import statement in every step would cost as much as the call."""
    from vllm import _custom_ops

    return _custom_ops


# -- the forward context, as an op that was given a layer's name sees it


def layer_call(layer_name: Any) -> tuple[str, Any, Any, torch.Tensor, torch.Tensor | None]:
    """Return what vLLM's forward context holds for the layer: (name, metadata, module, cache, slots).

    The metadata is that of the layer's attention, None while profiling and in dummy runs. The cache [blocks,
    block_size, L+R] is as vLLM stores it, empty before it exists. The slots [S] are int64, None while profiling.
    """
    vllm = _vllm()
    name = vllm.resolve_name(layer_name)
    metadata, module, kv_cache, slots = vllm.attention_context(name)
    return name, metadata, module, kv_cache, slots


def layer_module(layer_name: Any) -> tuple[str, Any]:
    """Return the layer's dotted name and vLLM's ``MLAAttention`` module, without reading the batch."""
    vllm = _vllm()
    name = vllm.resolve_name(layer_name)
    return name, vllm.forward_context().no_compile_layers[name]


def is_piecewise() -> bool:
    """Return whether this forward pass runs or captures piecewise graphs."""
    vllm = _vllm()
    return bool(vllm.forward_context().cudagraph_runtime_mode == vllm.piecewise)


def fp8_view(kv_cache: torch.Tensor) -> torch.Tensor:
    """Return vLLM's uint8 KV cache as a view of the platform's fp8 type; other caches as they are."""
    return kv_cache.view(fp8_dtype()) if kv_cache.dtype == torch.uint8 else kv_cache


def is_decode_only(metadata: Any, slots: torch.Tensor | None) -> bool:
    """Return whether every real row of the batch is a decode row that has a slot for its KV row."""
    rows = metadata.num_actual_tokens
    return (
        slots is not None
        and metadata.decode is not None
        and metadata.num_prefills == 0
        and metadata.num_decode_tokens == rows
        and slots.shape[0] >= rows
    )


def has_prefill_rows(metadata: Any) -> bool:
    """Return whether the batch holds rows that are not decode rows."""
    return bool(metadata.num_prefills)


def layers_of_forward_context() -> dict[str, Any]:
    """Return the model's layers by name from the current forward context; empty outside one."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    return dict(get_forward_context().no_compile_layers) if is_forward_context_available() else {}


class _VLLM(NamedTuple):
    """Functions that every step calls, imported once: an import statement costs as much as such a call."""

    attention_context: Callable[[str], tuple[Any, Any, torch.Tensor, torch.Tensor | None]]
    resolve_name: Callable[[Any], str]
    forward_context: Callable[[], Any]
    piecewise: Any


@functools.cache
def _vllm() -> _VLLM:
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.attention.attention import get_attention_context
    from vllm.utils.torch_utils import _resolve_layer_name

    return _VLLM(get_attention_context, _resolve_layer_name, get_forward_context, CUDAGraphMode.PIECEWISE)


def missing_names() -> tuple[str, ...]:
    """Return which functions that the ops call in every step this vLLM lacks, in words; empty if it has them all.

    Imports vLLM's attention, which takes one or two seconds: ask only if the fast path is switched on.
    """
    missing = []
    kernels = operator.attrgetter("rotary_embedding", "concat_and_cache_mla_rope_fused")
    for load in (_vllm, attention_hooks, lambda: kernels(_ops())):
        try:
            load()
        except (ImportError, AttributeError) as error:
            missing.append(str(error))
    return tuple(missing)
