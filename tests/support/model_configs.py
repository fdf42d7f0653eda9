"""Small configs of the dense MLA architectures in vLLM, with the real widths of a head, and what each should give."""

from dataclasses import dataclass, field
from typing import Any

from tests.sandbox.spec import Emulation, EngineSpec, VllmOptions

HEADS = 4

# What DeepSeek-V3's config names; the others differ in a few keys. 512 + 64 are the widths of all of them.
_COMMON: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": 96, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024, "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 1, "rope_theta": 10000.0, "first_k_dense_replace": 2, "moe_layer_freq": 1,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1,
    "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
# Layers are dense by default: vLLM's own experts gave other tokens in two runs on a CPU for some models.
_WITH_EXPERTS = {"first_k_dense_replace": 1}
_LING = {
    "num_experts": 4, "num_shared_experts": 1, "moe_shared_expert_intermediate_size": 64, "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "router_dtype": "fp32", "use_bias": False, "use_qkv_bias": False,
    "short_conv_kernel_size": 4, "first_k_dense_replace": 1,
}  # fmt: skip
_DEEPSEEK_YARN = {"type": "deepseek_yarn", "rope_type": "deepseek_yarn"}
_KDA = {"head_dim": 64, "num_heads": HEADS, "short_conv_kernel_size": 4, "kda_layers": [1], "full_attn_layers": [2]}


@dataclass(frozen=True)
class Row:
    """One row of the matrix.

    Attributes:
        config: the model's ``config.json``.
        layers: number of its MLA layers, drafts included. All should engage. 0 if ``reason`` is set.
        reason: code with which every layer, or the engine, is skipped; "" if all engage.
        not_mla: why vLLM gives its attention to no MLA layer; "" if it does.
        vllm_fails: an expression for the error with which vLLM itself ends on a CPU; "" if it can run it.
        drafts: proposed by the model's own draft layer, or by ``draft``.
        draft: ``config.json`` of a draft model (EAGLE-3).
    """

    config: dict[str, Any]
    layers: int = 2
    reason: str = ""
    not_mla: str = ""
    vllm_fails: str = ""
    drafts: int = 0
    draft: dict[str, Any] = field(default_factory=dict)


def _config(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    return _COMMON | {"architectures": [architecture], "model_type": model_type} | changes


_V3 = _config("DeepseekV3ForCausalLM", "deepseek_v3", rope_scaling=_YARN)
# vLLM's MLA kernel for CPUs takes blocks of 16 rows only.
_HYBRID = r"Aligned KV cache block size 128 is not supported by attention backend\(s\): CPU_MLA"


ROWS: dict[str, Row] = {
    "DeepSeek-V2": Row(_config(
        "DeepseekV2ForCausalLM", "deepseek_v2", rope_scaling=_YARN, topk_method="greedy", scoring_func="softmax"
    )),
    "DeepSeek-V2-Lite": Row(
        _config("DeepseekV2ForCausalLM", "deepseek_v2", q_lora_rank=None, topk_method="greedy", scoring_func="softmax")
    ),
    "DeepSeek-V3 with experts": Row(_V3 | _WITH_EXPERTS),
    "DeepSeek-V3 with its draft layer": Row(
        _V3 | {"num_nextn_predict_layers": 1, "first_k_dense_replace": 3}, 3, drafts=1
    ),
    "Kimi-K2": Row(_config("DeepseekV3ForCausalLM", "kimi_k2", rope_scaling=_YARN)),
    "GLM-4.7-Flash": Row(_config(
        "Glm4MoeLiteForCausalLM", "glm4_moe_lite", qk_nope_head_dim=192, v_head_dim=256, **_WITH_EXPERTS,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
    )),
    "LongCat-Flash": Row(_config(
        "LongcatFlashForCausalLM", "longcat_flash", num_layers=1, ffn_hidden_size=512, expert_ffn_hidden_size=64,
        moe_topk=2, zero_expert_num=2, zero_expert_type="identity", mla_scale_q_lora=True, mla_scale_kv_lora=True,
    ), vllm_fails=r"raised exception AttributeError\(\).*moe_runner"),
    "openPangu Ultra MoE": Row(_config(
        "PanguUltraMoEForCausalLM", "pangu_ultra_moe", sandwich_norm=True, num_nextn_predict_layers=0,
        router_enable_expert_bias=True, **_WITH_EXPERTS,
    )),
    "A.X K1": Row(_config("AXK1ForCausalLM", "axk1", rope_scaling=_YARN)),
    "Sarvam": Row(_config(
        "SarvamMLAForCausalLM", "sarvam_mla", q_lora_rank=None, head_dim=576,
        rope_scaling=_YARN | _DEEPSEEK_YARN, **_LING,
    ), 0, not_mla="this vLLM does not list the model type sarvam_mla as MLA"),
    "Ling 2.5": Row(
        _config("BailingMoeV2_5ForCausalLM", "bailing_hybrid", layer_group_size=2, head_dim=64, **_LING), 1,
        vllm_fails=_HYBRID,
    ),
    "Ling 3": Row(_config(
        "BailingMoeV3ForCausalLM", "bailing_hybrid", layer_group_size=2, head_dim=64, no_kda_lora=True, **_LING
    ), 1, vllm_fails=_HYBRID),
    "Mistral-Large-3": Row(_config(
        "MistralLarge3ForCausalLM", "deepseek_v3", rope_scaling=_YARN,
        llama_4_scaling={"original_max_position_embeddings": 16, "beta": 0.1},
    ), 0, "query_scaled"),
    "Kimi-Linear": Row(_config(
        "KimiLinearForCausalLM", "kimi_linear", q_lora_rank=None, mla_use_nope=True, linear_attn_config=_KDA,
        num_experts=4, num_experts_per_token=2,
    ), 0, "no_rope", vllm_fails="No module named 'cutlass'"),
    "DeepSeek-V3 with an EAGLE-3 draft": Row(
        _V3 | {"num_hidden_layers": 3, "first_k_dense_replace": 3}, 4, drafts=2,
        draft=_config(
            "Eagle3DeepseekV2ForCausalLM", "deepseek_v2", num_hidden_layers=1, draft_vocab_size=512,
            eagle_aux_hidden_state_layer_ids=[1, 2, 3],  # Model Runner V2 does not look into "eagle_config"
        ),
    ),
}  # fmt: skip


def spec_of(row: Row, **vllm: Any) -> EngineSpec:
    """Return the engine of a row with the flag on; ``vllm`` overrides its ``VllmOptions``."""
    options = {"config": row.config, "draft_config": row.draft, "drafts": row.drafts} | vllm
    return EngineSpec(("short", "mixed"), VllmOptions(**options), emulation=Emulation(linear="aten"))
