# SPDX-License-Identifier: Apache-2.0
"""The module integration: the forward of vLLM's MLA wrapper calls the plugin's op. It needs no compiled graph.

``installed`` surrounds the loading of a model, so that its wrappers are of our class. ``emit`` then decides for each
layer whether its wrapper calls the op. The same rules decide about a layer for the passes and for the module.
"""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.compat import wrapper as compat_wrapper
from vllm_aiter_mla.kernels.reference import gather_cos_sin, rotate
from vllm_aiter_mla.serving.layer import Layer

KNOWN_ROPES = ("RotaryEmbedding", "DeepseekScalingRotaryEmbedding", "YaRNScalingRotaryEmbedding")
"""Class names of vLLM's rotary embeddings that only rotate by the rows of one table."""
# vLLM's eager rotation rounds to the activation dtype three times.
ROUNDINGS = 8

_of_attention: WeakKeyDictionary[Any, ref[Any]] = WeakKeyDictionary()
"""The wrapper of each ``MLAAttention`` that was built while the class was installed: vLLM's layer has no way back.

Of the process, because wrappers are built where no engine is known; an entry goes with its layer.
"""


# -- the class


class FusedForward:
    """Mixin for vLLM's wrapper; while ``is_neox`` is None the wrapper runs vLLM's own forward.

    Attributes:
        is_neox: pairing of the rotation that the op does.
        compiled_rotation: what rotates in a compiled forward, as ``ops.Rope`` has it.
    """

    is_neox: bool | None = None
    compiled_rotation: str = compat_layer.ROTARY_EMB
    mla_attn: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _of_attention[self.mla_attn] = ref(self)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, llama_4_scaling: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], as vLLM's forward; RoPE, KV write and attention are one op.

        Args:
            positions: [T] int64.
            hidden_states: [T, hidden].
            llama_4_scaling: scales the rotated query; then vLLM's own forward runs.
        """
        if self.is_neox is None or positions.dim() != 1 or llama_4_scaling is not None:
            return super().forward(positions, hidden_states, llama_4_scaling)  # type: ignore[misc]
        # A constant of the graph: asked while it is traced.
        rotation = self.compiled_rotation if torch.compiler.is_compiling() else compat_layer.ROTARY_EMB
        return _forward(self, positions, hidden_states, self.is_neox, rotation)


def _forward(
    module: Any, positions: torch.Tensor, hidden_states: torch.Tensor, is_neox: bool, rotation: str
) -> torch.Tensor:
    q, kv_c, k_pe = _project(module, hidden_states)
    attention = module.mla_attn
    attended = q.new_empty((hidden_states.shape[0], module.num_heads * module.v_head_dim))
    torch.ops.vllm_aiter_mla.mla_attention_with_rope(
        q, k_pe, kv_c, positions, module.rotary_emb.cos_sin_cache, attention._k_scale, attended, is_neox,
        rotation, compat_wrapper.encode_layer_name(attention.layer_name),
    )  # fmt: skip
    if module.g_proj is not None:
        attended = attended * module.g_proj(hidden_states)[0].sigmoid()
    return module.o_proj(attended)[0]


def _project(module: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (q [T, N, P+R], kv_c [T, L] after its norm, k_pe [T, R]); the query and the key are not rotated."""
    latent, rope = module.kv_lora_rank, module.qk_rope_head_dim
    if module.q_lora_rank is None:
        kv_c, k_pe = module.kv_a_proj_with_mqa(hidden_states)[0].split([latent, rope], dim=-1)
        q, kv_c = module.q_proj(hidden_states)[0], module.kv_a_layernorm(kv_c)
    else:
        # One projection gives both latents; each is split off where vLLM's own norms expect it.
        q_c, kv_lora = module.fused_qkv_a_proj(hidden_states)[0].split([module.q_lora_rank, latent + rope], dim=-1)
        kv_c, k_pe = kv_lora.split([latent, rope], dim=-1)
        q_c, kv_c = compat_wrapper.norms(module, q_c, kv_c)
        q = module.q_b_proj(q_c)[0]
    return q.view(-1, module.num_heads, module.qk_head_dim), kv_c, k_pe


@functools.cache
def fused_class() -> type:
    """Return the class that replaces vLLM's."""
    vllm_own = compat_wrapper.MultiHeadLatentAttentionWrapper
    return type(f"Fused{vllm_own.__name__}", (FusedForward, vllm_own), {})


@contextmanager
def installed() -> Iterator[None]:
    """Let wrappers that are built inside the block be of our class, then restore vLLM's registry.

    If vLLM's code is not known, nothing is installed: ``emit`` then skips each layer and says why.
    """
    with compat_wrapper.replaced(fused_class()) if compat_wrapper.why_forwards_unknown() is None else nullcontext():
        yield


def wrapper_of(attention: Any) -> Any:
    """Return the wrapper of one of vLLM's ``MLAAttention`` layers, None if it is not of our class."""
    found = _of_attention.get(attention)
    return None if found is None else found()


# -- which layers call the op


def emit(modules: dict[str, Any]) -> tuple[str, ...]:
    """Let each admitted layer call the op; the others run vLLM's own forward, with the reason in the status file.

    Call it after the weights are loaded and the kernels are checked.

    Args:
        modules: the model's MLA layers by name.

    Returns:
        What each layer calls. It is a key for the compile cache, which holds what the layers called when it was filled.
    """
    found = []
    for name, attention in modules.items():
        try:
            skip = _emit(attention)
        except Exception as error:
            skip = Skip("not_evaluated", f"admission raised {type(error).__name__}: {error}")
        called = f"module, rotated by {wrapper_of(attention).compiled_rotation}" if skip is None else skip.code
        found.append(f"{name}: {called}")
        if skip is not None:
            Layer.skip_in_graph(attention, skip)
            log.say_once(logging.DEBUG, f"{name} is left to vLLM: {skip}")
    return tuple(found)


def _emit(attention: Any) -> Skip | None:
    """Let one layer call the op if it is admitted; else return why it is not."""
    wrapper = wrapper_of(attention)
    if wrapper is not None:
        wrapper.is_neox = None  # whatever was decided before
    skip = why_not_wrapped(attention) or why_not_rope(wrapper)
    if skip is not None:
        return skip
    embedding = wrapper.rotary_emb
    skip = Layer.of(attention).why_skipped(table_dtype=embedding.cos_sin_cache.dtype)
    if skip is None:
        wrapper.compiled_rotation = compiled_rotation(wrapper)
        Layer.of(attention).rotary_emb = embedding
        wrapper.is_neox = bool(embedding.is_neox_style)  # the last, because a forward calls the op by it
    return skip


def why_not_wrapped(attention: Any) -> Skip | None:
    """Return why the op may not replace the forward around a layer, which was built while ``installed``, or None."""
    skip = compat_wrapper.why_forwards_unknown()
    if skip is not None:
        return skip
    wrapper = wrapper_of(attention)
    if wrapper is None and compat_layer.is_nope(attention):  # graph partition would not help
        return Skip("no_rope", "the model's MLA has no rotary embedding (mla_use_nope in its config)")
    if wrapper is None:
        return Skip("unknown_forward", "the model's attention is not in vLLM's MultiHeadLatentAttentionWrapper")
    if compat_wrapper.quantises_output(wrapper):
        return Skip("fused_output_quant", "fuse_attn_quant is on, and vLLM's passes would not find the plugin's op")
    return compat_wrapper.why_wrapper_unknown(wrapper)


# -- the rotary embedding


def why_rope_unknown(wrapper: Any) -> Skip | None:
    """Return why the op may not rotate for a wrapper by the class and width of its embedding; needs no weights."""
    embedding, width = wrapper.rotary_emb, wrapper.qk_rope_head_dim
    if embedding is None:
        return Skip("no_rope", "the layer has no rotary embedding")
    name = type(embedding).__name__
    if name not in KNOWN_ROPES:
        return Skip("rope_other_operand", f"the rotary embedding is {name}; known: {', '.join(KNOWN_ROPES)}")
    if (embedding.rotary_dim, embedding.cos_sin_cache.shape[-1]) != (width, width):
        return Skip("partial_rotary", f"the rotary embedding turns {embedding.rotary_dim} of {width} columns")
    return None


def why_not_rope(wrapper: Any) -> Skip | None:
    """Return why the op may not rotate for this wrapper, or None: its class must be known, and a trial must agree."""
    skip = why_rope_unknown(wrapper)
    if skip is not None:
        return skip
    off = _rotation_error(wrapper.rotary_emb)
    if off <= ROUNDINGS:  # NaN is not
        return None
    name = type(wrapper.rotary_emb).__name__
    return Skip("query_not_rope", f"{name} differs from the rotation by its table by {off:.3g} roundings")


class _Namespaces(TorchDispatchMode):
    """Collects the namespaces of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.namespace)
        return func(*args, **(kwargs or {}))


def compiled_rotation(wrapper: Any) -> str:
    """Return what rotates as vLLM's compiled forward does, of ``ops.Rope``."""
    if compat_wrapper.fuses_rope(wrapper):
        return compat_layer.FUSED_ROPE
    generated = is_native(wrapper.rotary_emb) and compat_layer.rounds_once(wrapper.mla_attn)
    return compat_layer.ROTARY_KERNEL if generated else compat_layer.ROTARY_EMB


@torch.inference_mode()
def is_native(embedding: Any) -> bool:
    """Return whether vLLM's embedding rotates by torch's own ops, which Inductor turns into code of its own.

    Otherwise it calls a custom op, which stays one in a compiled graph.
    """
    with _Namespaces() as ran:
        embedding(*_trial(embedding.cos_sin_cache))
    return ran.seen <= {"aten", "prims"}


def _trial(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return positions [8], the first, the last and a few other rows of the table, with q [8, 2, R] and k [8, 1, R]."""
    draw = torch.Generator().manual_seed(0)
    positions = torch.cat([torch.tensor([0, table.shape[0] - 1]), torch.randint(table.shape[0], (6,), generator=draw)])
    q, k = (torch.randn(len(positions), heads, table.shape[1], generator=draw).to(table) for heads in (2, 1))
    return positions.to(table.device), q, k


@torch.inference_mode()
def _rotation_error(embedding: Any) -> float:
    """Largest difference between vLLM's embedding and the reference, in roundings of the activation dtype."""
    table = embedding.cos_sin_cache
    positions, q, k = _trial(table)
    cos, sin = (half.unsqueeze(1) for half in gather_cos_sin(table, positions))
    wanted = [rotate(x, cos, sin, embedding.is_neox_style) for x in (q, k)]
    found = embedding(positions, q.clone(), k.clone())
    step = torch.finfo(table.dtype).eps
    distances = [
        (one.float() - other).abs().amax() / (step * other.abs().amax())
        for one, other in zip(found, wanted, strict=True)
    ]
    return float(torch.stack(distances).max().item())
