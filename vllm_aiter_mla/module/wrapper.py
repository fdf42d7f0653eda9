"""vLLM's ``MultiHeadLatentAttentionWrapper`` with another forward, put in by vLLM's own registry of replaced layers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from vllm_aiter_mla.compat import wrapper as compat_wrapper

_of_attention: WeakKeyDictionary[Any, ref[Any]] = WeakKeyDictionary()
"""The wrapper of each ``MLAAttention`` that was built while the class was installed."""


class FusedForward:
    """What is added to vLLM's wrapper; a wrapper whose ``is_neox`` was never set runs vLLM's own forward.

    Attributes:
        is_neox: pairing of the rotation that the op does, None where vLLM's forward runs.
    """

    is_neox: bool | None = None
    mla_attn: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _of_attention[self.mla_attn] = ref(self)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, llama_4_scaling: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], as vLLM's; RoPE, KV write and attention are one op.

        Args:
            positions: [T] int64.
            hidden_states: [T, hidden].
            llama_4_scaling: scales the rotated query; vLLM's own forward runs where there is one.
        """
        if self.is_neox is None or llama_4_scaling is not None or positions.dim() != 1:
            out: torch.Tensor = super().forward(positions, hidden_states, llama_4_scaling)  # type: ignore[misc]
            return out
        return _forward(self, positions, hidden_states, self.is_neox)


def _forward(module: Any, positions: torch.Tensor, hidden_states: torch.Tensor, is_neox: bool) -> torch.Tensor:
    q, kv_c, k_pe = _project(module, hidden_states)
    attention = module.mla_attn
    attended = q.new_empty((hidden_states.shape[0], module.num_heads * module.v_head_dim))
    torch.ops.vllm_aiter_mla.mla_attention_with_rope(
        q, k_pe, kv_c, positions, module.rotary_emb.cos_sin_cache, attention._k_scale, attended, is_neox,
        compat_wrapper.encoded_name(attention),
    )  # fmt: skip
    if module.g_proj is not None:
        attended = attended * module.g_proj(hidden_states)[0].sigmoid()
    out: torch.Tensor = module.o_proj(attended)[0]
    return out


def _project(module: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q [T, N, P+R], kv_c [T, L] after its norm, k_pe [T, R]), the query and the key not rotated."""
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
    """The class that replaces vLLM's."""
    vllm_own = compat_wrapper.vllm_class()
    return type(f"Fused{vllm_own.__name__}", (FusedForward, vllm_own), {})


@contextmanager
def installed() -> Iterator[None]:
    """Let wrappers that are built inside the block be of our class; the registry is afterwards as it was.

    With a vLLM whose code is not known nothing is installed: ``emit`` then refuses each layer and says why.
    """
    with compat_wrapper.replaced(fused_class()) if compat_wrapper.why_unknown_code() is None else nullcontext():
        yield


def wrapper_of(attention: Any) -> Any:
    """The wrapper of one of vLLM's ``MLAAttention`` layers, None where it is not of our class."""
    found = _of_attention.get(attention)
    return None if found is None else found()
