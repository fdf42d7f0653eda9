"""AMD's AITER as a kernel back end.

``probe`` finds it without importing it, ``module`` imports it, ``contract`` says what it must never be given,
``dispatch`` which of its kernels will run, ``tables`` holds the cos and sin halves it reads, ``backend`` calls it and
``selfcheck`` compares the outcome with the reference. docs/aiter.md tells the whole.

The names below are resolved when they are asked for: `doctor` runs ``probe`` where there is no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
    from vllm_aiter_mla.kernels.aiter.module import AiterUnavailableError, load_op
    from vllm_aiter_mla.kernels.aiter.platform import Platform, detect_arch, detect_platform, fp8_view
    from vllm_aiter_mla.kernels.aiter.probe import ProbeResult, probe_aiter
    from vllm_aiter_mla.kernels.aiter.selfcheck import LayerShape, SelfCheckResult, self_check
    from vllm_aiter_mla.kernels.aiter.tables import KernelCaptureError

_MODULES = {
    "AiterBackend": "backend",
    "AiterUnavailableError": "module",
    "KernelCaptureError": "tables",
    "LayerShape": "selfcheck",
    "Platform": "platform",
    "ProbeResult": "probe",
    "SelfCheckResult": "selfcheck",
    "detect_arch": "platform",
    "detect_platform": "platform",
    "fp8_view": "platform",
    "load_op": "module",
    "probe_aiter": "probe",
    "self_check": "selfcheck",
}

__all__ = [
    "AiterBackend",
    "AiterUnavailableError",
    "KernelCaptureError",
    "LayerShape",
    "Platform",
    "ProbeResult",
    "SelfCheckResult",
    "detect_arch",
    "detect_platform",
    "fp8_view",
    "load_op",
    "probe_aiter",
    "self_check",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
