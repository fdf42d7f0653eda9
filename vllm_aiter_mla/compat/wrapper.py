"""vLLM's MLA wrapper: its registry of replaced layers, and what is known of its forward."""

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
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.models.common.ops import fused_q_kv_rmsnorm
from vllm.utils.torch_utils import _encode_layer_name

from vllm_aiter_mla.admission import Refusal

KNOWN_FORWARDS = {"795c52576b4a1fd8318e9679df0059bd292616e97bdbe14dd7166dd2fa625620": "0.30 to 0.33"}
"""Sources of ``MultiHeadLatentAttentionWrapper.forward`` that are known, by ``digest``, with vLLM's releases."""


def stock_class() -> type:
    """vLLM's wrapper around the projections, RoPE and attention of one MLA layer."""
    return MultiHeadLatentAttentionWrapper


@contextmanager
def replaced(cls: type) -> Iterator[None]:
    """Let vLLM build ``cls`` where a model asks for its wrapper; another plugin's replacement stays."""
    name = stock_class().__name__
    ours = name not in op_registry_oot
    if ours:
        stock_class().register_oot(cls)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if ours:
            op_registry_oot.pop(name, None)


def why_unknown(wrapper: Any) -> Refusal | None:
    """Why the wrapper's forward may not be replaced, or None: this plugin must have been written for its source."""
    cls = stock_class()
    found = digest(cls.forward)  # type: ignore[attr-defined]
    if found not in KNOWN_FORWARDS:
        return Refusal("unknown_forward", f"the source of {cls.__name__}.forward is not known (sha256 {found[:12]})")
    hooks = [name for name in ("_forward_hooks", "_forward_pre_hooks") if getattr(wrapper.mla_attn, name)]
    if hooks or wrapper.mla_attn.__dict__.get("forward") is not None:
        return Refusal("unknown_forward", "something else hooks the layer's attention module")
    return None


def digest(function: Any) -> str:
    """SHA-256 of a function's source without comments and layout; of nothing where there is no source."""
    left_out = (tokenize.COMMENT, tokenize.NL)
    try:
        lines = io.StringIO(textwrap.dedent(inspect.getsource(function)))
        kept = [token for token in tokenize.generate_tokens(lines.readline) if token.type not in left_out]
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
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


def encoded_name(attention: Any) -> Any:
    """The layer's name in the form in which vLLM's ops take it."""
    return _encode_layer_name(attention.layer_name)
