"""vLLM on a CPU with its compile pipeline on and reference kernels underneath: for the demo and the tests only.

Nothing here is reached in serving. ``activate()`` acts on the CPU platform alone; spawned workers activate it again
through ``plugin.register()`` because they inherit ``SANDBOX_ENV``.
"""

from __future__ import annotations

import os

SANDBOX_ENV = "AITER_MLA_SANDBOX"


def requested() -> bool:
    """Whether this process was asked, through its environment, to run vLLM in the sandbox."""
    return os.environ.get(SANDBOX_ENV) == "1"


def activate() -> None:
    """Turn the sandbox on in this process and in the workers it spawns. Idempotent.

    Raises:
        RuntimeError: vLLM's platform is not the CPU.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise RuntimeError(f"the sandbox runs on vLLM's CPU platform only, not on {current_platform.device_type}")
    os.environ[SANDBOX_ENV] = "1"
    from vllm_aiter_mla.admission import allow_impl
    from vllm_aiter_mla.sandbox import attention, gpu_ops, platform

    gpu_ops.register()
    attention.register()
    platform.wrap(type(current_platform))
    allow_impl("SandboxMLAImpl")
    from vllm_aiter_mla.sandbox.fake_aiter.engine import resume

    resume()
