"""Configs written after published checkpoints: the fields that vLLM needs, and how each is quantised.

The sizes are the checkpoints'; quantisation configs have the form that their tools write. What no status line rests on
(experts, vocabulary) may differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]

YARN = {
    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
V3: Config = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "vocab_size": 129280, "tie_word_embeddings": False, "rope_scaling": YARN,
}  # fmt: skip
V2: Config = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 5120,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 60, "n_routed_experts": 160,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "topk_group": 3, "topk_method": "group_limited_greedy",
    "first_k_dense_replace": 1, "scoring_func": "softmax", "vocab_size": 102400,
}  # fmt: skip
V2_LITE = V2 | {
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "n_routed_experts": 64, "n_group": 1,
    "topk_group": 1, "topk_method": "greedy",
}  # fmt: skip
V32 = V3 | {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 64,
    "index_head_dim": 128,
}  # fmt: skip
GLM5 = V32 | {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "hidden_size": 6144,
    "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32,
}  # fmt: skip
K2 = V3 | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "vocab_size": 163840, "num_nextn_predict_layers": 0,
    "max_position_embeddings": 131072,
}  # fmt: skip
KIMI_VL: Config = {
    "architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl", "torch_dtype": "bfloat16",
    "media_placeholder_token_id": 163605, "text_config": V2_LITE | {"model_type": "deepseek_v3", "vocab_size": 163840,
    "architectures": ["DeepseekV3ForCausalLM"], "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "vision_config": {"model_type": "moonvit", "hidden_size": 1152, "intermediate_size": 4304,
    "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "init_pos_emb_height": 64,
    "init_pos_emb_width": 64, "merge_kernel_size": [2, 2]},
}  # fmt: skip
K25: Config = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "bfloat16",
    "media_placeholder_token_id": 163605, "text_config": K2,
    "vision_config": {"vt_hidden_size": 1152, "vt_num_hidden_layers": 27, "vt_num_attention_heads": 16,
    "vt_intermediate_size": 4304, "patch_size": 14, "merge_kernel_size": [2, 2], "mm_hidden_size": 1152,
    "text_hidden_size": 7168, "init_pos_emb_height": 64, "init_pos_emb_width": 64, "init_pos_emb_time": 4},
}  # fmt: skip
FULL = [4, 8, 12, 16, 20, 24, 27]
KIMI_LINEAR: Config = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "torch_dtype": "bfloat16",
    "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_hidden_layers": 27,
    "num_attention_heads": 32, "num_key_value_heads": 32, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 72, "mla_use_nope": True,
    "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1,
    "topk_group": 1, "use_grouped_topk": True, "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "vocab_size": 163840, "model_max_length": 1048576, "hidden_act": "silu",
    "linear_attn_config": {"full_attn_layers": FULL, "kda_layers": sorted({*range(1, 28)} - {*FULL}),
    "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4},
}  # fmt: skip
GLM47_FLASH = V3 | {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "hidden_size": 2048,
    "intermediate_size": 10240, "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20,
    "num_key_value_heads": 20, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64,
    "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "rope_scaling": None,
    "max_position_embeddings": 202752, "partial_rotary_factor": 1.0,
}  # fmt: skip
LONGCAT: Config = {
    "architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash", "torch_dtype": "bfloat16",
    "hidden_size": 6144, "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "num_layers": 28,
    "num_attention_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 131072, "n_routed_experts": 512,
    "moe_topk": 12, "zero_expert_num": 256, "zero_expert_type": "identity", "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True, "routed_scaling_factor": 6.0, "rms_norm_eps": 1e-5, "rope_theta": 10000000.0,
    "vocab_size": 131072, "attention_method": "MLA", "attention_bias": False, "router_bias": False,
}  # fmt: skip
PANGU = V3 | {
    "architectures": ["PanguUltraMoEForCausalLM"], "model_type": "pangu_ultra_moe", "hidden_size": 7680,
    "rms_norm_eps": 1e-5, "vocab_size": 153600, "rope_scaling": None, "sandwich_norm": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 25600000}, "max_position_embeddings": 131072,
}  # fmt: skip
AXK1 = V3 | {
    "architectures": ["AXK1ForCausalLM"], "model_type": "axk1", "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_routed_experts": 192, "first_k_dense_replace": 1, "vocab_size": 163840,
}  # fmt: skip
SARVAM = V3 | {
    "architectures": ["SarvamMLAForCausalLM"], "model_type": "sarvam_mla", "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": None,
    "head_dim": 576, "num_experts": 128, "rope_scaling": None,
}  # fmt: skip
LING = V3 | {
    "architectures": ["BailingMoeV2_5ForCausalLM"], "model_type": "bailing_hybrid", "hidden_size": 8192,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 128,
    "num_experts": 256, "num_shared_experts": 1, "first_k_dense_replace": 4, "rope_scaling": None,
    "rope_theta": 6000000, "vocab_size": 157184, "moe_shared_expert_intermediate_size": 2048,
    "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "layer_group_size": 8, "group_norm_size": 8,
    "linear_silu": False, "partial_rotary_factor": 0.5, "use_bias": False, "use_qkv_bias": False, "use_qk_norm": True,
    "max_position_embeddings": 131072,
}  # fmt: skip
LARGE3 = V3 | {
    "architectures": ["MistralLarge3ForCausalLM"], "n_routed_experts": 128, "num_experts_per_tok": 4,
    "vocab_size": 131072, "max_position_embeddings": 294912, "num_nextn_predict_layers": 0,
}  # fmt: skip
VL2: Config = {
    "architectures": ["DeepseekVLV2ForCausalLM"], "model_type": "deepseek_vl_v2", "torch_dtype": "bfloat16",
    "tile_tag": "2D", "global_view_pos": "head", "candidate_resolutions": [[384, 384]],
    "vision_config": {"model_type": "vision", "layers": 27, "mlp_ratio": 3.7362, "patch_size": 14, "width": 1152,
    "model_name": "siglip_so400m_patch14_384", "image_size": 384},
    "projector_config": {"model_type": "mlp_projector", "input_dim": 1152, "n_embed": 2560,
    "projector_type": "downsample_mlp_gelu"},
    "language_config": V2_LITE | {"hidden_size": 2560, "num_hidden_layers": 30, "num_attention_heads": 32},
}  # fmt: skip
MINICPM3 = V3 | {
    "architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", "hidden_size": 2560, "num_hidden_layers": 62,
    "num_attention_heads": 40, "num_key_value_heads": 40, "q_lora_rank": 768, "kv_lora_rank": 256,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "rope_scaling": None,
}  # fmt: skip
LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def mx(dynamic: bool) -> Config:
    """A tensor in mxfp4 as Quark writes it."""
    return {
        "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0",
        "is_dynamic": dynamic, "symmetric": None,
    }  # fmt: skip


def quantised(weight: Config, inputs: Config) -> Config:
    """One of Quark's configs of a layer."""
    return {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}


MXFP4 = quantised(mx(False), mx(True))
PTPC = quantised(
    {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False, "symmetric": True},
    {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True, "symmetric": True},
)
INT8 = quantised(
    {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False, "symmetric": True},
    {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True, "symmetric": True},
)


def quark(*exclude: str, all_layers: Config = MXFP4, **layers: Config) -> Config:
    """AMD's Quark: all layers but ``exclude`` alike; ``layers`` are those of a pattern, ``attention`` or ``kv_b``."""
    patterns = {"attention": "*self_attn*", "kv_b": "*kv_b_proj"}
    return {
        "quant_method": "quark", "global_quant_config": all_layers, "exclude": ["lm_head", *exclude],
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        "layer_quant_config": {patterns[name]: config for name, config in layers.items()},
        "layer_type_quant_config": {},
    }  # fmt: skip


def tensors(bits: int, kind: str, strategy: str, dynamic: bool = False, **more: Any) -> Config:
    """A tensor as compressed-tensors describes it."""
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": dynamic} | more


W8A8 = (tensors(8, "int", "channel"), tensors(8, "int", "token", dynamic=True))
F8A8 = (tensors(8, "float", "channel"), tensors(8, "float", "token", dynamic=True))
W4A16 = (tensors(4, "int", "group", group_size=32), None)


def compressed(
    form: str, scheme: tuple[Config, Config | None], *ignore: str, targets: tuple[str, ...] = ("Linear",)
) -> Config:
    """llm-compressor's compressed-tensors."""
    group = {"targets": list(targets), "weights": scheme[0], "input_activations": scheme[1], "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head", *ignore], "quantization_status": "compressed", "kv_cache_scheme": None,
    }  # fmt: skip


def modelopt(algo: str, *exclude: str, cache: str | None = "FP8") -> Config:
    """NVIDIA's ModelOpt, as in ``hf_quant_config.json``."""
    inner = {"quant_algo": algo, "kv_cache_quant_algo": cache, "exclude_modules": ["lm_head", *exclude]}
    if algo == "NVFP4":
        inner["group_size"] = 16
    return {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": inner}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


@dataclass(frozen=True)
class Row:
    """One checkpoint.

    Attributes:
        config: its ``config.json``.
        quantisation: put into it as ``quantization_config``, where given.
        key: another place for that: a field's name, or ``file`` for ``hf_quant_config.json``.
        names: of ``kv_b_proj`` in a layer, with ``{i}`` for its number.
        arguments: of ``vllm serve``.
    """

    config: Config
    quantisation: Config | None = None
    key: str = "quantization_config"
    names: tuple[str, ...] = ("model.layers.{i}.self_attn.kv_b_proj",)
    arguments: tuple[str, ...] = ()

    def written(self) -> dict[str, Config]:
        """File contents by name."""
        if self.quantisation is None:
            return {"config.json": self.config}
        if self.key == "file":
            return {"config.json": self.config, "hf_quant_config.json": self.quantisation}
        return {"config.json": self.config | {self.key: self.quantisation}}


IN_LANGUAGE_MODEL = ("language_model.model.layers.{i}.self_attn.kv_b_proj",)
EVERY_KV_B = tuple(f"model.layers.{i}.self_attn.kv_b_proj" for i in range(61))
ROWS: dict[str, Row] = {
    "deepseek-ai/DeepSeek-V2": Row(V2),
    "deepseek-ai/DeepSeek-V2-Lite": Row(V2_LITE),
    "deepseek-ai/DeepSeek-V2.5 in float16": Row(V2, arguments=("--dtype", "float16")),
    "deepseek-ai/DeepSeek-V3": Row(V3, FP8),
    "deepseek-ai/DeepSeek-V3-0324, fp8 cache": Row(V3, FP8, arguments=("--kv-cache-dtype", "fp8")),
    "deepseek-ai/DeepSeek-V3.1": Row(V3, FP8 | {"scale_fmt": "ue8m0"}),
    "deepseek-ai/DeepSeek-R1-0528": Row(V3, FP8, arguments=("--kv-cache-dtype", "auto")),
    "unsloth/DeepSeek-R1-BF16": Row(V3),
    "bf16 weights quantised at the start": Row(V3, arguments=("--quantization", "fp8")),
    "fp8 with attention left out": Row(V3, FP8 | {"modules_to_not_convert": list(EVERY_KV_B)}),
    "fp8, a name left out that vLLM does not know": Row(V3, FP8 | {"modules_to_not_convert": ["attn"]}),
    "fp8 with one kv_b_proj left out": Row(V3, FP8 | {"ignored_layers": ["model.layers.0.self_attn.kv_b_proj"]}),
    "per-tensor fp8": Row(V3, {"quant_method": "fp8", "activation_scheme": "static"}),
    "cognitivecomputations/DeepSeek-R1-AWQ": Row(V3 | {"torch_dtype": "float16"}, AWQ),
    "AWQ with attention left out": Row(V3, AWQ | {"modules_to_not_convert": ["self_attn"]}),
    "OPEA/DeepSeek-R1-int4-gptq": Row(V3, GPTQ),
    "GPTQ with attention left out by dynamic": Row(V3, GPTQ | {"dynamic": {r"-:.*\.self_attn\..*": {}}}),
    "nvidia/DeepSeek-R1-FP4": Row(V3, modelopt("NVFP4", "model.layers.*.self_attn*"), key="file"),
    "nvidia/DeepSeek-R1-0528-FP4-v2, attention too": Row(V3, modelopt("NVFP4"), key="file"),
    "ModelOpt fp8": Row(V3, modelopt("FP8", cache=None), key="file"),
    "ModelOpt nvfp4 within config.json": Row(V3, modelopt("NVFP4", "model.layers.*.self_attn*")),
    "meituan/DeepSeek-R1-Channel-INT8": Row(V3, compressed("int-quantized", W8A8)),
    "compression_config": Row(V3, compressed("int-quantized", W8A8), key="compression_config"),
    "RedHatAI/DeepSeek-R1-quantized.w4a16": Row(V3, compressed("pack-quantized", W4A16)),
    "RedHatAI/DeepSeek-V3-FP8-dynamic": Row(V3, compressed("float-quantized", F8A8)),
    "compressed-tensors, experts alone": Row(V3, compressed("pack-quantized", W4A16, targets=("re:.*experts.*",))),
    "amd/DeepSeek-R1-MXFP4-Preview": Row(V3, quark()),
    "amd/DeepSeek-R1-0528-MXFP4, the MTP layer left out": Row(V3, quark("model.layers.61.self_attn.kv_b_proj")),
    "amd/DeepSeek-R1-MXFP4 with attention left out by name": Row(V3, quark(*EVERY_KV_B)),
    "amd/DeepSeek-R1-MXFP4 with attention left out by regex": Row(V3, quark("re:.*self_attn.*")),
    "amd/DeepSeek-R1-MXFP4 with a glob, which vLLM does not read": Row(V3, quark("*self_attn*")),
    "amd/DeepSeek-R1-MXFP4-ASQ, attention in PTPC fp8": Row(V3, quark(attention=PTPC)),
    "EmbeddedLLM/DeepSeek-R1-FP8-Dynamic (PTPC)": Row(V3, quark(all_layers=PTPC)),
    "Quark int8": Row(V3, quark(all_layers=INT8)),
    "Quark without its export record": Row(V3, {"quant_method": "quark", "exclude": ["re:.*self_attn.*"]}),
    "experts_int8, which ROCm does not take": Row(V3, arguments=("--quantization", "experts_int8")),
    "moonshotai/Kimi-K2-Instruct": Row(K2, FP8),
    "moonshotai/Kimi-K2-Base in bf16": Row(K2),
    "moonshotai/Kimi-K2-Thinking": Row(
        K2, compressed("pack-quantized", W4A16, "re:.*self_attn.*", "re:.*shared_experts.*")
    ),
    "moonshotai/Kimi-K2.5": Row(
        K25 | {"text_config": K2 | {"quantization_config": compressed("pack-quantized", W4A16, "re:.*self_attn.*")}},
        names=IN_LANGUAGE_MODEL,
    ),
    "moonshotai/Kimi-VL-A3B": Row(KIMI_VL, names=IN_LANGUAGE_MODEL),
    "moonshotai/Kimi-Linear-48B-A3B": Row(KIMI_LINEAR),
    "zai-org/GLM-4.7-Flash": Row(GLM47_FLASH),
    "zai-org/GLM-5-FP8": Row(GLM5, FP8),
    "deepseek-ai/DeepSeek-V3.2": Row(V32, FP8),
    "meituan-longcat/LongCat-Flash-Chat": Row(
        LONGCAT, names=("model.layers.{i}.self_attn.0.kv_b_proj", "model.layers.{i}.self_attn.1.kv_b_proj")
    ),
    "openPangu-Ultra-MoE-718B": Row(PANGU),
    "skt/A.X-K1": Row(AXK1),
    "sarvamai/sarvam-105b": Row(SARVAM),
    "inclusionAI/Ling-2.5-1T": Row(LING, names=("model.layers.{i}.self_attn.kv_b_proj",)),
    "mistralai/Mistral-Large-3": Row(LARGE3),
    "openbmb/MiniCPM3-4B": Row(MINICPM3),
    "meta-llama/Llama-3.1-8B": Row(LLAMA),
    "DeepSeek-V3 made sparse by --hf-overrides": Row(
        V3, arguments=("--hf-overrides", '{"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", '
        '"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}'),
    ),
    "4 layers by --hf-overrides": Row(V3, FP8, arguments=("--hf-overrides", '{"num_hidden_layers": 4}')),
}  # fmt: skip
"""By the checkpoint that each stands for."""
