"""Models that the sandbox's engines load: a small random DeepSeek checkpoint, a LoRA adapter for it, and any other
model as a ``config.json`` without a checkpoint, for which vLLM draws weights.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vllm_aiter_mla.commands.compat import llm_engine

RANK = 8
# Two slots: for a request without an adapter vLLM on a CPU takes the last slot, so that one must stay empty.
LORA_OPTIONS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
LORA_TARGETS = ("q_a_proj", "q_b_proj", "q_proj", "kv_a_proj_with_mqa", "o_proj", "down_proj")


def save_config(config: dict[str, Any], folder: Path) -> Path:
    """Write ``config.json`` into ``folder`` and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


@dataclass(frozen=True, slots=True)
class TinyDeepseek:
    """Sizes of the model. The MLA widths are DeepSeek's own: CPU decode is compiled for 512 + 64."""

    num_hidden_layers: int = 4
    hidden_size: int = 256
    num_attention_heads: int = 4
    q_lora_rank: int | None = 96
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    intermediate_size: int = 512
    vocab_size: int = 512
    max_position_embeddings: int = 1024
    num_nextn_predict_layers: int = 0
    yarn: bool = True
    dtype: str = "bfloat16"
    seed: int = 7

    def config(self) -> dict:
        """The Hugging Face ``config.json`` of the model."""
        sizes = asdict(self)
        for private in ("yarn", "dtype", "seed"):
            sizes.pop(private)
        # Draft layers came with DeepSeek-V3, whose dense layers and attention are V2's.
        version = 3 if self.num_nextn_predict_layers else 2
        return sizes | {
            "architectures": [f"DeepseekV{version}ForCausalLM"],
            "model_type": f"deepseek_v{version}",
            "num_key_value_heads": self.num_attention_heads,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "first_k_dense_replace": self.num_hidden_layers + self.num_nextn_predict_layers,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "moe_layer_freq": 1,
            "num_experts_per_tok": 1,
            "routed_scaling_factor": 1.0,
            "scoring_func": "softmax",
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": False,
            "rope_theta": 10000,
            "rope_scaling": self._rope_scaling(),
        }

    def _rope_scaling(self) -> dict | None:
        if not self.yarn:
            return None
        return {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": self.max_position_embeddings // 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """Random weights by checkpoint name, wide enough that greedy tokens vary."""
        generator = torch.Generator().manual_seed(self.seed)
        dtype = getattr(torch, self.dtype)

        def matrix(rows: int, cols: int, gain: float = 1.0) -> torch.Tensor:
            return (torch.randn(rows, cols, generator=generator) * gain / cols**0.5).to(dtype)

        def norm(width: int) -> torch.Tensor:
            return (1 + 0.1 * torch.randn(width, generator=generator)).to(dtype)

        out = {
            "model.embed_tokens.weight": matrix(self.vocab_size, self.hidden_size, self.hidden_size**0.5),
            "model.norm.weight": norm(self.hidden_size),
            "lm_head.weight": matrix(self.vocab_size, self.hidden_size, 3.0),
        }
        heads = self.num_attention_heads
        qk = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        for layer in range(self.num_hidden_layers + self.num_nextn_predict_layers):
            p = f"model.layers.{layer}."
            if layer >= self.num_hidden_layers:
                out |= {f"{p}{name}.weight": norm(self.hidden_size) for name in ("enorm", "hnorm", "shared_head.norm")}
                out[p + "eh_proj.weight"] = matrix(self.hidden_size, 2 * self.hidden_size)
                out[p + "embed_tokens.weight"] = out["model.embed_tokens.weight"].clone()
                out[p + "shared_head.head.weight"] = out["lm_head.weight"].clone()
            a = p + "self_attn."
            if self.q_lora_rank:
                out[a + "q_a_proj.weight"] = matrix(self.q_lora_rank, self.hidden_size)
                out[a + "q_a_layernorm.weight"] = norm(self.q_lora_rank)
                out[a + "q_b_proj.weight"] = matrix(qk, self.q_lora_rank, 2.0)
            else:
                out[a + "q_proj.weight"] = matrix(qk, self.hidden_size, 2.0)
            out[a + "kv_a_proj_with_mqa.weight"] = matrix(
                self.kv_lora_rank + self.qk_rope_head_dim, self.hidden_size, 2.0
            )
            out[a + "kv_a_layernorm.weight"] = norm(self.kv_lora_rank)
            out[a + "kv_b_proj.weight"] = matrix(heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank)
            out[a + "o_proj.weight"] = matrix(self.hidden_size, heads * self.v_head_dim, 2.0)
            out[p + "mlp.gate_proj.weight"] = matrix(self.intermediate_size, self.hidden_size)
            out[p + "mlp.up_proj.weight"] = matrix(self.intermediate_size, self.hidden_size)
            out[p + "mlp.down_proj.weight"] = matrix(self.hidden_size, self.intermediate_size)
            out[p + "input_layernorm.weight"] = norm(self.hidden_size)
            out[p + "post_attention_layernorm.weight"] = norm(self.hidden_size)
        return out

    def save(self, folder: Path) -> Path:
        """Write ``config.json`` and ``model.safetensors`` into ``folder`` and return it."""
        from safetensors.torch import save_file

        save_file(self.weights(), save_config(self.config(), folder) / "model.safetensors")
        return folder

    def save_adapter(self, folder: Path) -> Path:
        """Write a LoRA adapter of random weights, wide enough that tokens change, into ``folder`` and return it."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(0)
        tensors: dict[str, torch.Tensor] = {}
        for name, weight in self.weights().items():
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] not in LORA_TARGETS:
                continue
            rows, columns = weight.shape
            for half, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK))):
                drawn = torch.randn(shape, generator=generator) / shape[1] ** 0.5
                tensors[f"base_model.model.{module}.{half}.weight"] = drawn.to(weight.dtype)
        targets = sorted({name.split(".")[-3] for name in tensors})
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets, "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "adapter_model.safetensors")
        return folder


@cache
def register_random_weights() -> None:
    """Let vLLM know random weights, and model types whose config classes come with their checkpoints' own code."""
    from transformers import AutoConfig, PretrainedConfig

    llm_engine.register_random_weights()
    for name in ("pangu_ultra_moe", "sarvam_mla", "bailing_hybrid"):
        AutoConfig.register(name, type(name, (PretrainedConfig,), {"model_type": name}), exist_ok=True)
