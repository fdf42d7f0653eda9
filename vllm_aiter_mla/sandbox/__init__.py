"""vLLM with its compile pipeline on and a small model, for the demo and the tests only.

On a CPU: reference kernels underneath a platform that keeps the pipeline on. On a GPU: vLLM's own platform and its
Triton MLA back end, which admission does not take in serving. Nothing here is reached unless ``SANDBOX_ENV`` is set;
spawned workers activate it again through ``plugin.register()`` because they inherit the variable.
"""

from __future__ import annotations

import os

SANDBOX_ENV = "AITER_MLA_SANDBOX"
ON_CPU, ON_GPU = "1", "gpu"
"""Its two values."""

GPU_ATTENTION = ("TRITON_MLA", "TritonMLAImpl")
"""Back end and implementation of the demo on a GPU: every CUDA and ROCm build of vLLM has them."""


def requested() -> bool:
    """Whether this process was asked, through its environment, to run vLLM in the sandbox."""
    return os.environ.get(SANDBOX_ENV) in (ON_CPU, ON_GPU)


def activate() -> None:
    """Turn the sandbox on in this process and in the workers it spawns. Idempotent.

    Raises:
        RuntimeError: vLLM's platform is not the one that was asked for, the CPU by default.
    """
    from vllm.platforms import current_platform

    wanted = os.environ.setdefault(SANDBOX_ENV, ON_CPU)
    if wanted == ON_GPU:
        _activate_on_gpu(current_platform)
        return
    if not current_platform.is_cpu():
        raise RuntimeError(f"the sandbox runs on vLLM's CPU platform only, not on {current_platform.device_type}")
    from vllm_aiter_mla.admission import allow_impl
    from vllm_aiter_mla.sandbox import attention, gpu_ops, platform

    gpu_ops.register()
    attention.register()
    platform.wrap(type(current_platform))
    allow_impl("SandboxMLAImpl")
    from vllm_aiter_mla.sandbox.fake_aiter.engine import resume

    resume()


def _activate_on_gpu(platform: object) -> None:
    """Admit the demo's attention implementation; nothing of vLLM's is replaced."""
    if not platform.is_cuda_alike():  # type: ignore[attr-defined]
        raise RuntimeError(f"{SANDBOX_ENV}={ON_GPU} needs vLLM's CUDA or ROCm platform, not {platform!r}")
    from vllm_aiter_mla.admission import allow_impl

    allow_impl(GPU_ATTENTION[1])
