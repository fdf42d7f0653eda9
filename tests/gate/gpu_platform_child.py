"""A process that takes vLLM's own CUDA or ROCm platform class on a machine without a card, and builds one config.

``python gpu_platform_child.py '{"platform": "rocm", "arch": "gfx942", "model": ..., "options": {...}}'`` prints one
JSON line. Only what asks the driver is replaced: the card's properties, and C libraries that a CPU build lacks.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

import torch
import vllm.platforms

LIBRARIES: list[torch.library.Library] = []


def take_rocm(arch: str) -> None:
    """vLLM's RocmPlatform as it is on a machine with eight cards of ``arch``."""
    pretend_cards(types.SimpleNamespace(gcnArchName=f"{arch}:sramecc+:xnack-", total_memory=192 << 30), (9, 4))
    torch.version.hip = "7.0.1"
    without_libraries("vllm._C", "vllm._rocm_C")
    define_ops_of_the_library()
    import vllm.platforms.rocm as rocm

    vllm.platforms._current_platform = rocm.RocmPlatform()


def take_cuda(arch: str) -> None:
    """vLLM's CudaPlatform as it is on a machine with eight cards of compute capability ``arch``, "9.0" and the like."""
    major, minor = (int(part) for part in arch.split("."))
    pretend_cards(types.SimpleNamespace(total_memory=141 << 30, major=major, minor=minor), (major, minor))
    without_libraries("vllm._C_stable_libtorch", "vllm.vllm_flash_attn")
    define_ops_of_the_library()
    import vllm.platforms.cuda as cuda

    vllm.platforms._current_platform = cuda.NonNvmlCudaPlatform()


def without_libraries(*names: str) -> None:
    """Empty modules in place of compiled ones: a CPU build lacks them, or has its AVX-512 kernels under the name."""
    for name in names:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__getattr__ = no_kernel  # type: ignore[method-assign]


def define_ops_of_the_library() -> None:
    """Ops that vLLM's library registers and that RoPE + KV fusion names when it is imported."""
    library = torch.library.Library("_C", "FRAGMENT")
    LIBRARIES.append(library)
    library.define(
        "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache,"
        " bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()"
    )
    library.define("silu_and_mul(Tensor! result, Tensor input) -> ()")
    for kind in ("static_scaled", "dynamic_scaled", "dynamic_per_token_scaled"):
        library.define(f"{kind}_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()")


def no_kernel(name: str) -> Any:
    """Stands for a C function that is imported and never called."""
    if name.startswith("__"):
        raise AttributeError(name)
    return None


def pretend_cards(properties: types.SimpleNamespace, capability: tuple[int, int]) -> None:
    """What torch answers about cards without a driver."""
    properties.multi_processor_count, properties.name = 128, "a card"
    torch.cuda.get_device_properties = lambda device=None: properties  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.get_device_name = lambda device=None: properties.name
    torch.cuda.device_count = lambda: 8


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Load the plugins, build the config, say what the gate made of it and what attention back end vLLM takes."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if request["platform"] != "cpu":
        {"rocm": take_rocm, "cuda": take_cuda}[request["platform"]](request["arch"])
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    config = EngineArgs(
        model=request["model"], skip_tokenizer_init=True, max_model_len=512, **request["options"]
    ).create_engine_config()
    compilation = config.compilation_config
    engaged = compilation.inductor_compile_config.get("post_grad_custom_post_pass")
    return {
        "limit": getattr(engaged, "limit", None),
        "ranges": [[r.start, r.end] for r in compilation.get_compile_ranges()],
        "graph_partition": compilation.use_inductor_graph_partition,
        "splitting_ops": list(compilation.splitting_ops or ()),
        "cudagraph_mode": compilation.cudagraph_mode.name,
        "backend": backend_of(config),
    }


def backend_of(config: Any) -> str | None:
    """Implementation class of the attention back end that was asked for, as the platform admits it."""
    asked = config.attention_config.backend
    if asked is None:
        return None
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.selector import AttentionSelectorConfig

    facts = AttentionSelectorConfig(
        head_size=576,
        dtype=config.model_config.dtype,
        kv_cache_dtype=config.cache_config.cache_dtype,
        block_size=16,
        use_mla=True,
    )
    path = current_platform.get_attn_backend_cls(asked, facts, num_heads=4)
    return str(resolve_obj_by_qualname(path).get_impl_cls().__name__)


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(sys.argv[1]))))
