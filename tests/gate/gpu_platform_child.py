"""A process that takes vLLM's own CUDA or ROCm platform class on a machine without a card, and builds configs.

``python gpu_platform_child.py '{"platform": "rocm", "arch": "gfx942", "model": ..., "options": [{...}, ...]}'`` prints
one JSON line, a list. What is made up for it is listed in ``vllm_aiter_mla.commands.plan.simulated_card``.
"""

import json
import os
import sys
from typing import Any

from vllm_aiter_mla.commands.compat import rocm_config
from vllm_aiter_mla.commands.plan import simulated_card, vllm_facts
from vllm_aiter_mla.settings import Settings


def take_cuda(capability: str) -> None:
    """Make vLLM's CUDA platform the current one, with eight cards of a compute capability, "9.0" and the like."""
    major, minor = (int(part) for part in capability.split("."))
    simulated_card.simulate_cards((major, minor), 141)
    simulated_card.simulate_modules("vllm._C_stable_libtorch", "vllm.vllm_flash_attn")
    import vllm.platforms
    from vllm.platforms import cuda

    vllm.platforms._current_platform = cuda.NonNvmlCudaPlatform()


def main(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Load the plugins, build each config, say what the gate made of it and what attention back end vLLM takes."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if request["platform"] == "rocm":
        simulated_card.simulate_rocm(request["arch"])
        rocm_config.inspect_models_in_process()
    elif request["platform"] == "cuda":
        take_cuda(request["arch"])
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return [built(request["model"], one) for one in request["options"]]


def built(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Build one config; ``error`` is what stopped it, ``said`` the plugin's lines, each with its level."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_aiter_mla.compat import log

    said: list[tuple[int, str]] = []
    say = log.say

    def kept(level: int, message: str, stacklevel: int = 2) -> None:
        said.append((level, message))
        say(level, message)

    log._said.clear()
    log.say = kept
    try:
        config = EngineArgs(model=model, skip_tokenizer_init=True, max_model_len=512, **options).create_engine_config()
    except ValueError as error:
        return {"error": str(error), "said": said}
    finally:
        log.say = say
    from tests.gate.gate_support import compile_options  # it imports vLLM, which asks for the platform

    options = compile_options(config)
    slot = options.pop("slot")
    facts = vllm_facts.engine_facts(config, Settings())
    return {
        "gate": None if facts.gate is None else vars(facts.gate),
        "ranges": facts.compile_ranges,
        "said": said,
        "backend": backend_of(config),
        "options": options,
        "slot": {name: getattr(slot, name) for name in ("limit", "integration") if hasattr(slot, name)},
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
        head_size=576, dtype=config.model_config.dtype, kv_cache_dtype=config.cache_config.cache_dtype, block_size=16,
        use_mla=True,
    )  # fmt: skip
    path = current_platform.get_attn_backend_cls(asked, facts, num_heads=4)
    return str(resolve_obj_by_qualname(path).get_impl_cls().__name__)


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(sys.argv[1])), default=str))
