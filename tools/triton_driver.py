"""A driver of Triton for a card that is not there: kernels are compiled, loaded nowhere, and launched into a stub.

Everything that Triton does in Python for a launch on ROCm runs: its dispatch, and the launcher of a compiled kernel.
Only the two calls into HIP are replaced, which load a code object and launch it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tools import aot


class Driver:
    """One card of ``target``, whose C launch is ``launch``; ``launcher`` replaces Triton's own class of launchers."""

    def __init__(self, target: aot.Target, launch: Callable[..., None], launcher: Any = None) -> None:
        from triton.backends.amd import driver
        from triton.backends.compiler import GPUTarget

        self.launcher_cls = launcher or driver.HIPLauncher
        self._target = GPUTarget(target.backend, target.arch, target.warp_size)
        self.utils = SimpleNamespace(
            launch=launch,
            load_binary=lambda *binary: (1, 1, 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 64 * 1024},
            build_signature_metadata=lambda signature: bytes(len(signature)),
        )

    def get_current_target(self) -> Any:
        """Return what Triton compiles for."""
        return self._target

    def get_current_device(self) -> int:
        """Return the number of the one card."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the null stream."""
        return 0


@contextmanager
def installed(target: aot.Target, launch: Callable[..., None], launcher: Any = None) -> Iterator[None]:
    """Let Triton's kernels run on ``Driver(target, launch, launcher)``. One architecture a process, as for ``aot``."""
    aot.claim_process(target)
    from triton.backends.amd import driver as amd
    from triton.runtime.driver import driver

    from vllm_aiter_mla.kernels.triton.kernel import decode_prep_kernel

    before, caches = driver._active, decode_prep_kernel.device_caches
    try:
        driver.set_active(Driver(target, launch, launcher))
        caches.clear()
        # It stands for an argument in a signature; the C part of the driver defines it, since 3.7.
        with mock.patch.object(amd, "PyKernelArg", SimpleNamespace, create=True):
            yield
    finally:
        driver._active = before
        for compiled, *_ in caches.values():
            for kernel in compiled.values():
                kernel.module = None  # Nothing is loaded that its end could unload.
        caches.clear()
