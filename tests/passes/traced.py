"""Graphs traced from vLLM's own modules: its MLA wrapper and rotary embeddings, through Inductor's post-grad passes."""

from typing import Any

import torch
from torch import fx, nn
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding

from tests.passes.stubs import Sizes, scales_of

POSITIONS = 24


class Captured(Exception):  # noqa: N818  not an error: it ends the compilation where code would be generated
    """Carries the graph that a post-grad pass is given."""


class Linear(nn.Module):
    """A projection that returns a pair, as vLLM's do."""

    def __init__(self, rows: int, cols: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(cols, rows, dtype=dtype) / rows**0.5, requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return nn.functional.linear(x, self.weight), None


class Attention(nn.Module):
    """What ``MLAAttention.forward`` reads; the ops find the stub layer by name."""

    use_direct_call = False
    forward = MLAAttention.forward

    def __init__(self, name: str, cache: str) -> None:
        super().__init__()
        self.layer_name, self.kv_cache_dtype = name, cache
        self._k_scale, _ = scales_of(name)


def rotary(kind: str, is_neox: bool, sizes: Sizes, dtype: torch.dtype) -> nn.Module:
    """vLLM's module; ``kind`` ends in "op" where its custom op is switched on."""
    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["all" if kind.endswith("op") else "none"]))
    common: dict[str, Any] = {
        "head_size": sizes.r, "rotary_dim": sizes.r, "max_position_embeddings": POSITIONS, "base": 10000.0,
        "is_neox_style": is_neox, "dtype": dtype,
    }  # fmt: skip
    with set_current_vllm_config(config):
        if kind.startswith("deepseek"):
            return DeepseekScalingRotaryEmbedding(scaling_factor=4.0, mscale=1.0, mscale_all_dim=1.0, **common)
        return RotaryEmbedding(**common)


def wrapper(name: str, rope: nn.Module, sizes: Sizes, dtype: torch.dtype, q_lora: bool, cache: str) -> nn.Module:
    """vLLM's MLA wrapper with its forward as it is; only its parts are made by hand."""
    made = MultiHeadLatentAttentionWrapper.__new__(MultiHeadLatentAttentionWrapper)
    nn.Module.__init__(made)
    z, kv = sizes, sizes.latent + sizes.r
    parts: dict[str, Any] = {
        "num_heads": z.n, "qk_nope_head_dim": z.p, "qk_rope_head_dim": z.r, "qk_head_dim": z.p + z.r, "v_head_dim": z.v,
        "kv_lora_rank": z.latent, "q_lora_rank": z.q_lora if q_lora else None,
        "kv_a_layernorm": nn.RMSNorm(z.latent, dtype=dtype), "rotary_emb": rope,
        "o_proj": Linear(z.n * z.v, z.hidden, dtype), "mla_attn": Attention(name, cache), "fuse_qkv_rmsnorm": False,
        "dcp_q_replicate": False, "is_sparse": False, "skip_topk": False, "indexer": None, "g_proj": None,
    }  # fmt: skip
    if q_lora:
        parts |= {"fused_qkv_a_proj": Linear(z.hidden, z.q_lora + kv, dtype)}
        parts |= {"q_a_layernorm": nn.RMSNorm(z.q_lora, dtype=dtype)}
        parts |= {"q_b_proj": Linear(z.q_lora, z.n * (z.p + z.r), dtype)}
    else:
        parts |= {
            "kv_a_proj_with_mqa": Linear(z.hidden, kv, dtype),
            "q_proj": Linear(z.hidden, z.n * (z.p + z.r), dtype),
        }
    for key, value in parts.items():
        setattr(made, key, value)
    return made.eval().requires_grad_(False)


def model(
    kind: str, is_neox: bool, layers: int, q_lora: bool, dtype: torch.dtype, cache: str = "auto"
) -> tuple[nn.Module, list[str]]:
    """A stack of layers with residuals, and their names."""
    sizes = Sizes()
    torch.manual_seed(0)
    rope = rotary(kind, is_neox, sizes, dtype)
    names = [f"model.layers.{i}.attn" for i in range(layers)]
    stack = nn.ModuleList(wrapper(name, rope, sizes, dtype, q_lora, cache) for name in names)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = stack

        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            for layer in self.stack:
                x = x + layer.forward(positions, x)
            return x

    return Model(), names


def trace(module: nn.Module, dtype: torch.dtype) -> fx.GraphModule:
    """The graph of ``module`` as a post-grad pass sees it, with a symbolic number of tokens."""
    found: list[fx.Graph] = []

    def take(graph: fx.Graph) -> None:
        found.append(graph)
        raise Captured

    compiled(module, dtype, take)
    return fx.GraphModule({}, found[0])


def compiled(module: nn.Module, dtype: torch.dtype, post_pass: Any) -> None:
    """Compile ``module`` with a post-grad pass, until something raises ``Captured``."""
    x, positions = torch.randn(5, Sizes().hidden, dtype=dtype), torch.arange(5)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(positions, 0)
    options = {"post_grad_custom_post_pass": post_pass, "enable_auto_functionalized_v2": False, "fx_graph_cache": False}
    torch._dynamo.reset()
    try:
        with torch.no_grad():
            torch.compile(module, fullgraph=True, options=options)(x, positions)
    except Exception as error:
        if not isinstance(getattr(error, "inner_exception", error), Captured):
            raise
    finally:
        torch._dynamo.reset()
