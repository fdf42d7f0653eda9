"""The machine that figures belong to: card, driver and versions."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from vllm_aiter_mla import files

DRIVERS = (Path("/sys/module/amdgpu/version"), Path("/sys/module/nvidia/version"))


def machine() -> dict[str, str]:
    """Card and versions, as they belong beside any figure. Needs a GPU."""
    return {
        "card": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "triton": _triton(),
        "runtime": f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
        "python": platform.python_version(),
    }


def about() -> dict[str, str | None]:
    """``machine`` with the driver and the versions of plugin, vLLM and AITER: where one differs, so may the figures."""
    stamp = files.stamp("measured", 1)[files.KEY]
    return machine() | {"driver": _driver()} | {name: stamp[name] for name in ("plugin", "vllm", "aiter")}


def _triton() -> str:
    # ROCm's builds have names of their own, so the module is asked.
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def _driver() -> str:
    """The driver's version; the kernel's for one that came with it."""
    for path in DRIVERS:
        try:
            return path.read_text().strip()
        except OSError:
            continue
    return os.uname().release
