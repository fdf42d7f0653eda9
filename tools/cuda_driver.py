"""Triton's own CUDA driver over a libcuda that only writes down launches, ``recording_libcuda.c``: no card is needed.

The twin of ``triton_driver`` for sm90. There the C part of a launch is replaced; here all of Triton runs, its compiled
launcher too, down to ``cuLaunchKernelEx``. A process has one libcuda, so this needs a process of its own.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import aot

MOST_PARAMETERS = 64  # as in recording_libcuda.c
# What Triton's launcher adds to the kernel's arguments: two addresses of scratch memory.
SCRATCH = ("global_scratch", "profile_scratch")
BYTES = {"i1": 1, "i8": 1, "u8": 1, "i16": 2, "i32": 4, "u32": 4, "fp32": 4, "i64": 8, "u64": 8, "fp64": 8}
"""Of an argument that is no pointer, by Triton's name of its type."""


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_int), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("count", ctypes.c_int), ("values", ctypes.c_uint64 * MOST_PARAMETERS),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launched:
    """One launch as the driver received it."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int  # bytes
    arguments: dict[str, int]  # by the kernel's names, without those that are compiled in


class Recorder:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._names: list[tuple[str, ...]] = []  # of each loaded kernel's parameters

    def announce(self, signature: dict[str, str]) -> None:
        """Say what parameters the kernel has that is loaded next: Triton's types by name."""
        types = {name: kind for name, kind in signature.items() if kind != "constexpr"}
        sizes = [8 if kind.startswith("*") else BYTES[kind] for kind in (*types.values(), *("*i8" for _ in SCRATCH))]
        self._names.append((*types, *SCRATCH))
        self._library.announce_kernel(len(sizes), (ctypes.c_int * len(sizes))(*sizes))

    @property
    def launches(self) -> int:
        """How many launches there have been."""
        return ctypes.c_int.in_dll(self._library, "recorded_launches").value

    def last(self) -> Launched:
        """Return the last launch."""
        last = _Launch.in_dll(self._library, "recorded_launch")
        arguments = dict(zip(self._names[last.kernel], last.values[: last.count], strict=True))
        return Launched(tuple(last.grid), tuple(last.block), last.shared, arguments)


def install(folder: Path) -> Recorder:
    """Build the library in ``folder`` and let Triton's kernels be launched into it, for the rest of this process.

    Raises:
        RuntimeError: this process has compiled for another architecture, or interprets its kernels.
        subprocess.CalledProcessError: the C compiler fails.
    """
    aot.claim_process(aot.TARGETS["sm90"])
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.driver import driver

    # By its name every later look-up of libcuda in this process ends here, that of Triton's compiled parts too.
    recorder = Recorder(ctypes.CDLL(str(_build(folder, nvidia.include_dirs)), mode=ctypes.RTLD_GLOBAL))

    class Driver(nvidia.CudaDriver):
        """Triton's driver, without what it asks of torch."""

        def __init__(self) -> None:
            self.utils = nvidia.CudaUtils()
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda device: 0
            self.get_device_capability = lambda device=0: (9, 0)

        def launcher_cls(self, source: Any, metadata: Any) -> Any:
            recorder.announce(source.signature)
            return nvidia.CudaLauncher(source, metadata)

    driver.set_active(Driver())
    return recorder


def _build(folder: Path, include: list[str]) -> Path:
    library = folder / "libcuda.so.1"
    source = Path(__file__).with_name("recording_libcuda.c")
    command = ["cc", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library), str(source)]
    subprocess.run([*command, *(f"-I{path}" for path in include)], check=True, capture_output=True)
    return library
