"""The sandbox's vLLM plugin. vLLM loads it in each process that has ``FOLDER`` on its path, and in its workers.

``FOLDER`` holds entry points that no installation lists; ``engine.environment_for`` puts it on PYTHONPATH. On a CPU the
plugin brings reference kernels and a platform that keeps the compile pipeline. On a GPU it admits vLLM's Triton MLA
back end, which is not admitted in serving.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

NAME = "aiter_mla_sandbox"
FOLDER = Path(__file__).parent / "entry_point"
CHECKOUT = Path(__file__).resolve().parents[2]
MUTATION = "AITER_MLA_SANDBOX_MUTATION"
"""Environment variable: "module:function" that plants a bug in every process of a server; tests only."""
BUG_RAN = "aiter-mla: the planted bug ran"
GPU_ATTENTION = ("TRITON_MLA", "TritonMLAImpl")
"""Back end and implementation of the demo on a GPU: every CUDA and ROCm build of vLLM has them."""


@cache
def bug_ran() -> None:
    """Say once in this process that a planted bug has done its harm."""
    print(BUG_RAN, flush=True)


def spoil(owner: Any, name: str, wrong: Callable[..., Any], when: Callable[..., bool] = lambda *_: True) -> None:
    """Replace a function by ``wrong``, which receives the right one first, where ``when`` holds for the arguments.

    A call says that the bug ran once it has returned: over a stale signature it raises, and something right runs.
    """
    inner = getattr(owner, name)

    def planted(*given: Any) -> Any:
        if not when(*given):
            return inner(*given)
        found = wrong(inner, *given)
        bug_ran()
        return found

    setattr(owner, name, planted)


def activate() -> None:
    """Turn the sandbox on in this process, before or after the plugin registers. Idempotent.

    Raises:
        RuntimeError: vLLM's platform is neither the CPU nor a CUDA or ROCm GPU.
    """
    from vllm.platforms import current_platform

    from vllm_aiter_mla.compat.layer import KNOWN_IMPLS

    if current_platform.is_cuda_alike():
        KNOWN_IMPLS.add(GPU_ATTENTION[1])
        return
    if not current_platform.is_cpu():
        raise RuntimeError(f"the sandbox is for CPUs and for CUDA and ROCm GPUs, not on {current_platform.device_type}")
    from tests.sandbox import attention, card, cuda_graphs, gpu_ops, model, platform, rehearsal_card, worker

    gpu_ops.register()
    gpu_ops.mend_experts()
    attention.register()
    model.register_random_weights()
    platform.see_no_amx()
    platform.wrap(type(current_platform))
    platform.allow_fp8_mla(type(current_platform))
    KNOWN_IMPLS.add("SandboxMLAImpl")
    worker.engage()
    if os.environ.get(cuda_graphs.VARIABLE) == "1":
        cuda_graphs.emulate()
    card.admit()
    card.resume()
    rehearsal_card.count_compiled_kernels()
    if os.environ.get(MUTATION):
        from tests.sandbox import knobs

        knobs.plant(os.environ[MUTATION])


def check_device(device: str) -> None:
    """Check that vLLM's platform is for the engine's device.

    Args:
        device: "cpu" or "gpu".

    Raises:
        RuntimeError: the platform is for the other one.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() != (device == "cpu"):
        raise RuntimeError(f"the engine is for a {device.upper()}, vLLM's platform is {current_platform.device_type}")
