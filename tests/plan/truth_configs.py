"""Configs written after published checkpoints, each with what vLLM makes of it on a gfx950.

The sizes are the checkpoints'; quantisation configs have the format that their tools write. What no answer rests on
(experts, vocabulary) may differ. The expected columns follow the rule of vLLM's ``MLAAttention``: an absorb weight is
mxfp4 where ``kv_b_proj`` is held in bfloat16, and fp8 elsewhere. Small configs of other architectures are in
``tests/support/model_configs.py``.
"""

from dataclasses import dataclass
from typing import Any

from vllm_aiter_mla.commands.plan import config_source

Config = dict[str, Any]


def example(name: str, **changed: Any) -> Config:
    """The bundled example, in bfloat16 unless ``changed`` says otherwise."""
    config = config_source.examples()[name]["config"] | {"quantization_config": None} | changed
    return {field: value for field, value in config.items() if field != "quantization_config" or value is not None}


V3 = example("deepseek-r1")
K2 = example("kimi-k2")
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
KIMI_VL: Config = {
    "architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl", "torch_dtype": "bfloat16",
    "media_placeholder_token_id": 163605, "text_config": V2_LITE | {"model_type": "deepseek_v3", "vocab_size": 163840,
    "architectures": ["DeepseekV3ForCausalLM"], "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "vision_config": {"model_type": "moonvit", "hidden_size": 1152, "intermediate_size": 4304,
    "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "init_pos_emb_height": 64,
    "init_pos_emb_width": 64, "merge_kernel_size": [2, 2]},
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
FP8 = config_source.examples()["deepseek-r1"]["config"]["quantization_config"]


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
PTPC, INT8 = (
    quantised(*(
        {"dtype": dtype, "qscheme": "per_channel", "ch_axis": axis, "is_dynamic": bool(axis), "symmetric": True}
        for axis in (0, 1)
    ))
    for dtype in ("fp8_e4m3", "int8")
)  # fmt: skip


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
    format: str, scheme: tuple[Config, Config | None], *ignore: str, targets: tuple[str, ...] = ("Linear",)
) -> Config:
    """llm-compressor's compressed-tensors."""
    group = {"targets": list(targets), "weights": scheme[0], "input_activations": scheme[1], "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group},
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
EVERY_KV_B = tuple(f"model.layers.{i}.self_attn.kv_b_proj" for i in range(61))


@dataclass(frozen=True)
class Row:
    """One checkpoint, or one set of options.

    Attributes:
        config: its ``config.json``.
        formats: MLA layers by the format of their absorb weight.
        quantisation: put into it as ``quantization_config``, where given.
        key: another place for that: a field's name, or ``file`` for ``hf_quant_config.json``.
        arguments: of ``vllm serve``, besides ``-tp 4``.
        codes: reasons against.
        limit: the gate's decode limit; None where the gate declines.
    """

    config: Config
    formats: dict[str, int]
    quantisation: Config | None = None
    key: str = "quantization_config"
    arguments: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    limit: int | None = 1024

    def written(self) -> dict[str, Config]:
        """File contents by name."""
        if self.quantisation is None:
            return {"config.json": self.config}
        if self.key == "file":
            return {"config.json": self.config, "hf_quant_config.json": self.quantisation}
        return {"config.json": self.config | {self.key: self.quantisation}}


def v3(format: str, quantisation: Config | None = None, *arguments: str, **more: Any) -> Row:
    """DeepSeek-V3 with all its 61 layers alike."""
    return Row(V3, {format: 61}, quantisation, arguments=arguments, **more)


def option(*arguments: str, codes: tuple[str, ...] = (), limit: int | None = 1024) -> Row:
    """DeepSeek-V3 as published, with options."""
    return Row(V3, {"fp8": 61}, FP8, arguments=arguments, codes=codes, limit=limit)


SPARSE = {"codes": ("sparse_mla",), "limit": None}
NOTHING = {"codes": ("not_mla",), "limit": None}
PASSES = ("--additional-config", '{"aiter_mla": {"integration": "passes"}}')
MTP = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}')
IN_ATTENTION = "re:.*self_attn.*"
ROWS: dict[str, Row] = {
    "deepseek-ai/DeepSeek-V2": Row(V2, {"mxfp4": 60}),
    "deepseek-ai/DeepSeek-V2-Lite": Row(V2_LITE, {"mxfp4": 27}),
    "float16": Row(V2, {"fp8": 60}, arguments=("--dtype", "float16")),
    "deepseek-ai/DeepSeek-V3": v3("fp8", FP8),
    "deepseek-ai/DeepSeek-V3.1": v3("fp8", FP8 | {"scale_fmt": "ue8m0"}),
    "unsloth/DeepSeek-R1-BF16": v3("mxfp4"),
    "bf16 weights quantised at the start": v3("mxfp4", None, "--quantization", "fp8"),
    "fp8 with attention left out": v3("mxfp4", FP8 | {"modules_to_not_convert": list(EVERY_KV_B)}),
    "fp8, a name left out that vLLM does not know": v3("fp8", FP8 | {"modules_to_not_convert": ["attn"]}),
    "fp8 with one kv_b_proj left out": Row(V3, {"fp8": 60, "mxfp4": 1}, FP8 | {"ignored_layers": [EVERY_KV_B[0]]}),
    "per-tensor fp8": v3("fp8", {"quant_method": "fp8", "activation_scheme": "static"}),
    "cognitivecomputations/DeepSeek-R1-AWQ": v3("fp8", AWQ, "--dtype", "float16"),
    "AWQ with attention left out": v3("mxfp4", AWQ | {"modules_to_not_convert": ["self_attn"]}),
    "OPEA/DeepSeek-R1-int4-gptq": v3("fp8", GPTQ),
    "GPTQ with attention left out by dynamic": v3("mxfp4", GPTQ | {"dynamic": {r"-:.*\.self_attn\..*": {}}}),
    "nvidia/DeepSeek-R1-FP4": v3("mxfp4", modelopt("NVFP4", "model.layers.*.self_attn*"), key="file"),
    "nvidia/DeepSeek-R1-0528-FP4-v2, attention too": v3("fp8", modelopt("NVFP4"), key="file"),
    "ModelOpt fp8": v3("fp8", modelopt("FP8", cache=None), key="file"),
    "ModelOpt nvfp4 within config.json": v3("mxfp4", modelopt("NVFP4", "model.layers.*.self_attn*")),
    "meituan/DeepSeek-R1-Channel-INT8": v3("fp8", compressed("int-quantized", W8A8)),
    "compression_config": v3("fp8", compressed("int-quantized", W8A8), key="compression_config"),
    "RedHatAI/DeepSeek-R1-quantized.w4a16": v3("fp8", compressed("pack-quantized", W4A16)),
    "RedHatAI/DeepSeek-V3-FP8-dynamic": v3("fp8", compressed("float-quantized", F8A8)),
    "compressed-tensors, experts only": v3("mxfp4", compressed("pack-quantized", W4A16, targets=("re:.*experts.*",))),
    "amd/DeepSeek-R1-MXFP4-Preview": v3("fp8", quark()),
    "amd/DeepSeek-R1-MXFP4 with attention left out by name": v3("mxfp4", quark(*EVERY_KV_B)),
    "amd/DeepSeek-R1-MXFP4 with attention left out by regex": v3("mxfp4", quark(IN_ATTENTION)),
    "amd/DeepSeek-R1-MXFP4 with a glob, which vLLM does not read": v3("fp8", quark("*self_attn*")),
    "amd/DeepSeek-R1-MXFP4-ASQ, attention in PTPC fp8": v3("fp8", quark(attention=PTPC)),
    "EmbeddedLLM/DeepSeek-R1-FP8-Dynamic (PTPC)": v3("fp8", quark(all_layers=PTPC)),
    "Quark int8": v3("fp8", quark(all_layers=INT8)),
    "moonshotai/Kimi-K2-Base in bf16": Row(K2, {"mxfp4": 61}),
    "moonshotai/Kimi-K2.5": Row(example("kimi-k2.5"), {"mxfp4": 61}),
    "moonshotai/Kimi-VL-A3B": Row(KIMI_VL, {"mxfp4": 27}),
    "moonshotai/Kimi-K3": Row(example("kimi-k3"), {"mxfp4": 24}, codes=("no_rope",)),
    "moonshotai/Kimi-K3, by the passes": Row(
        example("kimi-k3"), {"mxfp4": 24}, arguments=("-cc.use_inductor_graph_partition=true",), codes=("no_rope",)
    ),
    "zai-org/GLM-4.7-Flash": Row(example("glm-4.7-flash"), {"mxfp4": 47}, codes=("mxfp4_width",)),
    "zai-org/GLM-5-FP8": Row(example("glm-5"), {"fp8": 78}, FP8, **SPARSE),
    "deepseek-ai/DeepSeek-V3.2": Row(example("deepseek-v3.2"), {"fp8": 61}, FP8, **SPARSE),
    "deepseek-ai/deepseek-vl2": Row(VL2, {"mxfp4": 30}),
    "openbmb/MiniCPM3-4B, read without its class": Row(MINICPM3, {}, **NOTHING),
    "meta-llama/Llama-3.1-8B": Row(LLAMA, {}, **NOTHING),
    "4 layers": Row(V3, {"fp8": 4}, FP8, arguments=("--hf-overrides", '{"num_hidden_layers": 4}')),
    "a draft": Row(V3, {"fp8": 62}, FP8, arguments=MTP, limit=2048),
    "an fp8 cache": option("--kv-cache-dtype", "fp8"),
    "256 requests": option("--max-num-seqs", "256", limit=256),
    "a limit": option("-cc.pass_config.aiter_qk_rope_kvcache_fusion_max_token_num=64", limit=64),
    "decode context parallelism": option("-dcp", "2", codes=("dcp",), limit=None),
    "pipeline parallelism": option("-pp", "2"),
    "data and expert parallelism": option("-dp", "2", "--enable-expert-parallel"),
    "a folder of compiled graphs": option("-cc.cache_dir=/given", codes=("cache_dir",), limit=None),
    "the same folder, where nothing is compiled": option("-cc.cache_dir=/given", "--enforce-eager"),
    "eager, by the module": option("--enforce-eager"),
    "eager, by the passes": option("--enforce-eager", *PASSES, codes=("enforce_eager",), limit=None),
    "no optimisation, by the passes": option("-O0", *PASSES, codes=("compilation_mode",), limit=None),
    "a cut graph, by the passes": option(
        "-cc.use_inductor_graph_partition=false", *PASSES, codes=("graph_partition",), limit=None
    ),
    "no cut": option("-cc.splitting_ops=[]", *PASSES),
    "an e5m2 cache": option("--kv-cache-dtype", "fp8_e5m2", codes=("kv_cache_dtype",), limit=None),
    "Triton's attention": option(
        "--attention-backend", "TRITON_MLA", codes=("attention_backend",), limit=None
    ),
    "every reason": option(
        "-dcp", "2", "--enforce-eager", "--kv-cache-dtype", "fp8_e5m2", *PASSES,
        codes=("dcp", "kv_cache_dtype", "enforce_eager"), limit=None,
    ),
    "strict": option("-dcp", "2", "--additional-config", '{"aiter_mla": {"strict": true}}', codes=("dcp",), limit=None),
}  # fmt: skip
"""By the checkpoint or the options that each stands for."""
