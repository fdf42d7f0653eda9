# SPDX-License-Identifier: Apache-2.0
"""vLLM's MLA wrapper: its registry of replaced layers, and the two forwards that the module integration replaces."""

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.models.common.ops import fused_q_kv_rmsnorm
from vllm.utils.torch_utils import _encode_layer_name

from vllm_aiter_mla.admission import KV_UPDATE_OP, Skip, plain_name
from vllm_aiter_mla.compat.release import VLLMS_FUSION

encode_layer_name = _encode_layer_name  # into the form that vLLM's ops take
KNOWN_FORWARDS: dict[Any, dict[str, str]] = {
    MultiHeadLatentAttentionWrapper: {
        "350e020dc4895d2c0007cc2049b392ee05c86cd3cb6f517e9f5fa7736d39046f": "0.30 to 0.33"
    },
    MLAAttention: {"691e1a24ee409e23c2146968714375b5a192c89c9efd2b021e993aceb60d73b1": "0.30 to 0.33"},
}
"""The two forwards that the op replaces: ``digest`` of each known source, and vLLM's releases that have it."""


@contextmanager
def replaced(cls: type) -> Iterator[None]:
    """Let vLLM build ``cls`` where a model asks for its wrapper; another plugin's replacement stays."""
    name = MultiHeadLatentAttentionWrapper.__name__
    if name not in op_registry_oot:
        MultiHeadLatentAttentionWrapper.register_oot(cls)
    try:
        yield
    finally:
        if op_registry_oot.get(name) is cls:
            del op_registry_oot[name]


def why_forwards_unknown() -> Skip | None:
    """Return why no forward may be replaced, or None if this plugin was written for both sources."""
    for cls, known in KNOWN_FORWARDS.items():
        found = digest(cls.forward)
        if found not in known:
            return Skip("unknown_forward", f"the source of {cls.__name__}.forward is not known ({found[:12] or '-'})")
    return None


def why_wrapper_unknown(wrapper: Any) -> Skip | None:
    """Return why the op may not replace this wrapper's forward, or None."""
    attention = wrapper.mla_attn
    if type(attention) is not MLAAttention:
        return Skip("unknown_forward", f"the attention module is {type(attention).__name__}")
    if attention._forward_hooks or attention._forward_pre_hooks or "forward" in attention.__dict__:
        return Skip("unknown_forward", "something else hooks the layer's attention module")
    return None


def digest(function: Any) -> str:
    """Return the SHA-256 of the code that a call runs, by ``source_digest``; "" if there is no source.

    For a decorated function this is the decorator's own source, not the source of the function inside.
    """
    return _digest_of(getattr(function, "__code__", None))


@functools.cache  # asked for each layer of a model; another function has another code object
def _digest_of(code: Any) -> str:
    try:
        return source_digest(inspect.getsource(code))
    except (OSError, TypeError, SyntaxError):
        return ""


def source_digest(source: str) -> str:
    """Return the SHA-256 of the syntax tree of ``source`` without docstrings, comments and layout.

    It is the same on Python 3.11 to 3.14. ``ast.dump`` is not: its output differs in empty and new fields.
    """
    return hashlib.sha256(_spelt(ast.parse(textwrap.dedent(source))).encode()).hexdigest()


def _spelt(node: Any) -> str:
    if isinstance(node, list):
        return f"[{', '.join(map(_spelt, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        fields["body"] = node.body[ast.get_docstring(node, clean=False) is not None :]
    if isinstance(node, ast.JoinedStr):  # 3.12 ends a nested format with an empty string
        fields["values"] = [part for part in node.values if getattr(part, "value", None) != ""]
    # Later releases add fields, which are None or empty in code that earlier ones can read.
    kept = (f"{name}={_spelt(value)}" for name, value in fields.items() if value is not None and value != [])
    return f"{type(node).__name__}({', '.join(kept)})"


def norms(wrapper: Any, q_c: torch.Tensor, kv_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both latents after their norms, in one launch if the model asks vLLM for that."""
    if not wrapper.fuse_qkv_rmsnorm:
        return wrapper.q_a_layernorm(q_c), wrapper.kv_a_layernorm(kv_c)
    q_norm, kv_norm = wrapper.q_a_layernorm, wrapper.kv_a_layernorm
    return fused_q_kv_rmsnorm(q_c, kv_c, q_norm.weight.data, kv_norm.weight.data, q_norm.variance_epsilon)


def quantises_output(wrapper: Any) -> bool:
    """Return whether vLLM's passes would fuse a quantisation into the attention op; they do not know our op."""
    return _runs_vllms_pass(wrapper, "fuse_attn_quant")


def fuses_rope(wrapper: Any) -> bool:
    """Return whether vLLM's own pass would fuse RoPE and the KV write, between which no cut may lie."""
    compilation = wrapper.mla_attn._vllm_config.compilation_config
    is_cut = KV_UPDATE_OP in map(plain_name, compilation.splitting_ops or ())
    return _runs_vllms_pass(wrapper, VLLMS_FUSION) and (bool(compilation.use_inductor_graph_partition) or not is_cut)


def _runs_vllms_pass(wrapper: Any, field: str) -> bool:
    """Return whether vLLM compiles, with a pass of its own on; ``field`` is that of its ``PassConfig``."""
    compilation = wrapper.mla_attn._vllm_config.compilation_config
    is_compiled = compilation.mode is not None and compilation.mode.name == "VLLM_COMPILE"
    return bool(is_compiled and getattr(compilation.pass_config, field, False))
