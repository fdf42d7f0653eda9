"""What the vendors' runtimes say: versions, properties, error names, and the DOT dump of a captured graph.

AMD: hip-python (extra ``rocm``). It imports anywhere and loads ``libamdhip64`` at the first call, so that a machine
without ROCm is met here and nowhere else. NVIDIA: torch's own dump, and cuda-bindings (extra ``cuda``) for versions.
"""

from __future__ import annotations

import importlib
import platform
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

MAPS = Path("/proc/self/maps")


class DeviceError(RuntimeError):
    """A runtime cannot answer; the message is one sentence that says why."""


def hip_call(name: str, *arguments: Any) -> tuple[Any, ...]:
    """What a call of hip-python returns behind its error code.

    ``hipGraphGetNodes`` is never called: it hands an uninitialised capacity over (6.4, 7.2, 10.0).

    Raises:
        DeviceError: hip-python is not installed, has no such call, or the call fails.
    """
    try:
        result = getattr(importlib.import_module("hip.hip"), name)(*arguments)
    except ImportError:
        raise DeviceError("hip-python is not installed: in a checkout, pip install '.[rocm]'") from None
    except (RuntimeError, AttributeError) as error:
        raise DeviceError(f"hip-python cannot call {name}: {first_line(error)}") from None
    code, *values = result if isinstance(result, tuple) else (result,)
    if int(code) != 0:
        raise DeviceError(f"{name} says {getattr(code, 'name', code)}")
    return tuple(values)


def hip_dot(graph: int) -> str:
    """The plain DOT text of a graph, given the address that ``CUDAGraph.raw_cuda_graph()`` returns.

    Plain on purpose: HIP prints a verbose label into a fixed buffer without looking at the length of a kernel's
    name, 500 bytes in ROCm/clr and 4096 later (hip_graph_internal.hpp, GraphKernelNode::GetLabel); PyTorch's own
    names are longer than the former. The plain label holds the name in a string.

    Raises:
        DeviceError: HIP refuses, sees no GPU, or this process holds two HIP runtimes and the graph is the other one's.
    """
    if not hip_call("hipGetDeviceCount")[0]:  # loads the library, before the copies are counted
        raise DeviceError("HIP sees no AMD GPU")
    check_one_runtime()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        hip_call("hipGraphDebugDotPrint", graph, str(path).encode(), 0)
        return path.read_text(errors="replace")


def hip_versions() -> dict[str, str]:
    """Versions of the HIP runtime and driver, for instance {"hip runtime": "7.0.51831"}. Raises DeviceError."""
    names = {"hip runtime": "hipRuntimeGetVersion", "hip driver": "hipDriverGetVersion"}
    # HIP_VERSION is major * 10,000,000 + minor * 100,000 + patch.
    found = {what: int(hip_call(name)[0]) for what, name in names.items()}
    return {what: f"{n // 10_000_000}.{n // 100_000 % 100}.{n % 100_000}" for what, n in found.items()}


def check_one_runtime(maps: Path = MAPS) -> None:
    """Raise DeviceError where this process has loaded two different copies of libamdhip64.

    A graph of torch's copy is no graph to another one, and passing it on would crash the process.
    """
    if not maps.exists():
        return
    paths = {line.split()[-1] for line in maps.read_text(errors="replace").splitlines() if "libamdhip64" in line}
    if len(paths) > 1:
        raise DeviceError(f"two HIP runtimes are loaded, torch's and hip-python's: {', '.join(sorted(paths))}")


def graph_dot(graph: torch.cuda.CUDAGraph) -> str:
    """The DOT text of a graph captured with ``keep_graph=True``, on either vendor.

    Raises:
        DeviceError: why there is none.
    """
    if torch.version.hip is not None:
        return hip_dot(graph.raw_cuda_graph())
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces every dump as a warning
        path = Path(folder) / "graph.dot"
        graph.debug_dump(str(path))
        if not path.exists():
            raise DeviceError("torch wrote no DOT dump of the graph")
        return path.read_text(errors="replace")


def machine() -> dict[str, str]:
    """Card and versions, as they belong beside any figure; what a runtime cannot say is left out."""
    found = {"torch": str(torch.__version__), "python": platform.python_version(), "card": "none (CPU)"}
    if not torch.cuda.is_available():
        return found
    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    found |= {"card": card.name, "memory": f"{card.total_memory / 2**30:.0f} GiB"}
    if torch.version.hip is None:
        return found | {"runtime": f"CUDA {torch.version.cuda}"} | _cuda_versions()
    found |= {"runtime": f"ROCm {torch.version.hip}", "arch": card.gcnArchName}
    try:
        return found | hip_versions()
    except DeviceError as error:
        return found | {"introspection": str(error)}


def _cuda_versions() -> dict[str, str]:
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return {}
    found = {}
    for what, name in (("cuda runtime", "cudaRuntimeGetVersion"), ("cuda driver", "cudaDriverGetVersion")):
        code, version = getattr(runtime, name)()
        if int(code) == 0:
            found[what] = f"{version // 1000}.{version % 1000 // 10}"
    return found


def first_line(error: BaseException) -> str:
    """What an error says, on one line."""
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
