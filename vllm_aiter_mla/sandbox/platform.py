"""Keep vLLM's compile pipeline on under the CPU platform, which otherwise turns it into a plain Inductor trace."""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

# Set by a spec: vLLM's own MLA RoPE pass, which PassConfig switches off on anything that is no GPU.
stock_pass = False


@cache
def wrap(platform_cls: type) -> None:
    """Wrap ``platform_cls.check_and_update_config`` so that the compile pipeline survives it. Idempotent."""
    inner = platform_cls.check_and_update_config  # type: ignore[attr-defined]

    @wraps(inner)
    def check_and_update_config(vllm_config: Any) -> None:
        wanted = _Wanted(vllm_config)
        wanted.choose_reference_backend(vllm_config)
        inner(vllm_config)
        wanted.restore(vllm_config)

    platform_cls.check_and_update_config = staticmethod(check_and_update_config)  # type: ignore[attr-defined]


class _Wanted:
    """What the user asked for before the CPU platform overrides it."""

    def __init__(self, vllm_config: Any) -> None:
        self.mode = vllm_config.compilation_config.mode
        self.chunked_prefill = vllm_config.scheduler_config.enable_chunked_prefill
        self.max_num_batched_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.torch_wrap = vllm_config.compilation_config.ir_enable_torch_wrap

    def choose_reference_backend(self, vllm_config: Any) -> None:
        """Ask for CPU_MLA by name: on processors with AMX vLLM would take a backend without ``W_UK_T``."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        vllm_config.attention_config.backend = AttentionBackendEnum.CPU_MLA

    def restore(self, vllm_config: Any) -> None:
        """Put the compile mode and, where the cache is not quantised, chunked prefill back."""
        from vllm.config import CompilationMode

        compilation = vllm_config.compilation_config
        if self.mode == CompilationMode.VLLM_COMPILE:
            compilation.mode = self.mode
            # The platform names "inductor" only for its own plain trace.
            compilation.backend = "inductor"
            compilation.ir_enable_torch_wrap = self.torch_wrap
            # None makes the piecewise back end assert "out of considered ranges" without a GPU.
            compilation.compile_sizes = []
        if stock_pass:
            compilation.pass_config.fuse_rope_kvcache_cat_mla = True
        # The chunked path of an fp8 cache needs a gather kernel that only GPU builds have.
        if self.chunked_prefill and not vllm_config.cache_config.cache_dtype.startswith("fp8"):
            vllm_config.scheduler_config.enable_chunked_prefill = True
            vllm_config.scheduler_config.max_num_batched_tokens = self.max_num_batched_tokens
