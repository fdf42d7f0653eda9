"""vLLM's MLA wrapper: its registry of replaced layers, and what is known of the code that a module emission skips."""

from __future__ import annotations

import hashlib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.models.common.ops import fused_q_kv_rmsnorm
from vllm.utils.torch_utils import _encode_layer_name

from vllm_aiter_mla.admission import Skip

KNOWN_FORWARDS: dict[Any, dict[str, str]] = {
    MultiHeadLatentAttentionWrapper: {
        "795c52576b4a1fd8318e9679df0059bd292616e97bdbe14dd7166dd2fa625620": "0.30 to 0.33"
    },
    MLAAttention: {"af8d8424a2d50fd0a7c6671dac28ce61edd61993c4506787772c90672b83e75f": "0.30 to 0.33"},
}
"""Sources of the two forwards that the op replaces, by ``digest``, with vLLM's releases."""


def vllm_class() -> type:
    """vLLM's wrapper around the projections, RoPE and attention of one MLA layer."""
    return MultiHeadLatentAttentionWrapper


@contextmanager
def replaced(cls: type) -> Iterator[None]:
    """Let vLLM build ``cls`` where a model asks for its wrapper; another plugin's replacement stays."""
    name = vllm_class().__name__
    if name not in op_registry_oot:
        vllm_class().register_oot(cls)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if op_registry_oot.get(name) is cls:
            del op_registry_oot[name]


def why_unknown_code() -> Skip | None:
    """Why no forward may be replaced, or None: this plugin must have been written for both sources."""
    for cls, known in KNOWN_FORWARDS.items():
        found = digest(cls.forward)
        if found not in known:
            return Skip("unknown_forward", f"the source of {cls.__name__}.forward is not known ({found[:12] or '-'})")
    return None


def why_unknown(wrapper: Any) -> Skip | None:
    """Why the op may not do what this wrapper and its attention module do, or None."""
    attention = wrapper.mla_attn
    if type(attention) is not MLAAttention:
        return Skip("unknown_forward", f"the attention module is {type(attention).__name__}")
    hooked = attention._forward_hooks or attention._forward_pre_hooks or "forward" in attention.__dict__
    if hooked:
        return Skip("unknown_forward", "something else hooks the layer's attention module")
    return None


def digest(function: Any) -> str:
    """SHA-256 of the code that a call runs, without comments and layout; of nothing where there is no source.

    Not of what a decorator says that it wraps: its own source counts.
    """
    left_out = (tokenize.COMMENT, tokenize.NL)
    try:
        lines = io.StringIO(textwrap.dedent(inspect.getsource(function.__code__)))
        kept = [token for token in tokenize.generate_tokens(lines.readline) if token.type not in left_out]
    except (AttributeError, OSError, TypeError, SyntaxError, tokenize.TokenError):
        return ""
    marks = {tokenize.INDENT: ">", tokenize.DEDENT: "<", tokenize.NEWLINE: ";"}
    return hashlib.sha256(" ".join(marks.get(token.type, token.string) for token in kept).encode()).hexdigest()


def norms(wrapper: Any, q_c: torch.Tensor, kv_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both latents after their norms: in one launch where the model asks vLLM for that."""
    if not wrapper.fuse_qkv_rmsnorm:
        return wrapper.q_a_layernorm(q_c), wrapper.kv_a_layernorm(kv_c)
    q_norm, kv_norm = wrapper.q_a_layernorm, wrapper.kv_a_layernorm
    found: tuple[torch.Tensor, torch.Tensor] = fused_q_kv_rmsnorm(
        q_c, kv_c, q_norm.weight.data, kv_norm.weight.data, q_norm.variance_epsilon
    )
    return found


def scales_query(wrapper: Any) -> bool:
    """Whether the model scales its query after RoPE."""
    text_config = wrapper.mla_attn._vllm_config.model_config.hf_text_config
    return getattr(text_config, "llama_4_scaling", None) is not None


def quantises_output(wrapper: Any) -> bool:
    """Whether vLLM's passes would fuse a quantisation into the attention op: they do not know ours."""
    compilation = wrapper.mla_attn._vllm_config.compilation_config
    is_compiled = compilation.mode is not None and compilation.mode.name == "VLLM_COMPILE"
    return bool(is_compiled and compilation.pass_config.fuse_attn_quant)


def encoded_name(attention: Any) -> Any:
    """The layer's name in the form in which vLLM's ops take it."""
    return _encode_layer_name(attention.layer_name)
