"""Checks of the machine: Python, torch, ROCm, driver, card, Triton, hip-python."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import sys
from pathlib import Path
from types import ModuleType

from vllm_aiter_mla import status
from vllm_aiter_mla.commands.doctor.check import Check, Given, named

ARCHITECTURES = {"gfx942": "MI300X, MI325X", "gfx950": "MI350X, MI355X"}
OLDEST_PYTHON = (3, 10)
OLDEST_ROCM = 7
# Paths that a test replaces.
ROCM_VERSION = Path("/opt/rocm/.info/version")
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
AMD_MODULE = Path("/sys/module/amdgpu")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
SEE_TORCH = "see the line `torch` above"
ELSEWHERE = "run doctor on the machine that serves"


def python(given: Given) -> Check:
    """Check the interpreter's version."""
    version = platform.python_version()
    if sys.version_info >= OLDEST_PYTHON:
        return Check("ok", version)
    return Check("problem", f"{version} is too old", "use Python 3.10 or newer")


def torch(given: Given) -> Check:
    """Check that torch is there, and what it was built for."""
    found = module("torch")
    if isinstance(found, Exception):
        return Check("problem", f"not importable: {found}", "install the ROCm build of torch; vLLM needs it too")
    if found.version.hip:
        return Check("ok", f"{found.__version__} for ROCm {found.version.hip}")
    if found.version.cuda:
        detail = f"{found.__version__} for CUDA {found.version.cuda}: no MLA implementation on CUDA is admitted yet"
        return Check("problem", detail, "serve on MI300X or MI355X")
    return Check("warning", f"{found.__version__}, a CPU build: for plan and tests", ELSEWHERE)


def rocm(given: Given) -> Check:
    """Check the ROCm release: the one torch was built for, else the installed one."""
    version = rocm_version()
    if version is None:
        return Check("unknown", "no ROCm is visible from here", ELSEWHERE)
    if int(version.partition(".")[0]) >= OLDEST_ROCM:
        return Check("ok", version)
    return Check("problem", f"{version}: AITER's bf16 arithmetic is wrong before 7", "use ROCm 7 or newer")


def driver(given: Given) -> Check:
    """Check the kernel driver, from its own files."""
    if AMD_MODULE.is_dir():
        version = AMD_MODULE / "version"
        return Check("ok", f"amdgpu {version.read_text().strip() if version.is_file() else 'of the kernel'}")
    if NVIDIA_DRIVER.is_file():
        return Check("problem", f"NVIDIA: {NVIDIA_DRIVER.read_text().splitlines()[0]}", SEE_TORCH)
    return Check("unknown", "no GPU driver is visible from here", ELSEWHERE)


def gpu(given: Given) -> Check:
    """Check the card's architecture."""
    arch = gpu_arch()
    if arch is None:
        return Check("unknown", "no GPU is visible from here", ELSEWHERE)
    if arch in ARCHITECTURES:
        return Check("ok", f"{arch} ({ARCHITECTURES[arch]}){status.unmeasured(arch)}")
    if arch.startswith("gfx"):
        return Check("problem", f"{arch}: AITER's op is for {', '.join(ARCHITECTURES)}", "serve on another card")
    return Check("problem", f"{arch}: not an AMD card; no MLA implementation there is admitted", SEE_TORCH)


def triton(given: Given) -> Check:
    """Check for Triton, which only ``kernel=triton`` needs."""
    version = distribution("triton", "pytorch-triton-rocm", "triton-rocm")
    if version is None:
        return Check("warning", "not installed: kernel=triton is not available", "only if you want that kernel")
    return Check("ok", version)


def hip_python(given: Given) -> Check:
    """Check for hip-python, which only ``verify`` needs."""
    version = distribution("hip-python")
    if version is None and rocm_version() is not None:
        return Check("warning", "not installed: `verify` checks less", "in a checkout: pip install '.[rocm]'")
    return Check("ok", version or "not installed, and not needed without ROCm")


def module(name: str) -> ModuleType | Exception:
    """Return the imported module, or the exception of the attempt."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        return error


def distribution(*names: str) -> str | None:
    """Return name and version of the first of ``names`` that is installed."""
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def rocm_version() -> str | None:
    """Return the ROCm release that torch was built for, else the installed one, else None."""
    found = module("torch")
    if not isinstance(found, Exception) and found.version.hip:
        return str(found.version.hip)
    return ROCM_VERSION.read_text().strip() if ROCM_VERSION.is_file() else None


def gpu_arch() -> str | None:
    """Return gfx942, sm90, ...: of the current device, else of the first card that the AMD driver lists."""
    found = module("torch")
    if not isinstance(found, Exception) and found.cuda.is_available():
        from vllm_aiter_mla.kernels.platform import detect_platform

        return detect_platform().arch
    for node in sorted(KFD_NODES.glob("*/properties")):
        for line in node.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "gfx_target_version" and int(value):
                return gfx_name(int(value))
    return None


def gfx_name(target_version: int) -> str:
    """Return "gfx942" for 90402: decimal pairs are major, minor and stepping; the name has them in hexadecimal."""
    major, minor, stepping = target_version // 10000, target_version // 100 % 100, target_version % 100
    return f"gfx{major}{minor:x}{stepping:x}"


CHECKS = named(python, torch, rocm, driver, gpu, triton, hip_python)
