"""Cards for a rehearsal without a GPU: one whose kernels are interpreted, and one that only writes launches down.

The first has right values and no time. On the second everything compiles for sm_90 and is launched into a libcuda that
computes nothing, so it fills Triton's cache, and each comparison there has to fail.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

VALUES, LAUNCHES = "values", "launches"
ENVIRONMENT = {
    VALUES: {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    LAUNCHES: {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
}
"""What a process of each kind needs before it starts."""


def install(kind: str) -> None:
    """Let the package run on a card of that kind, for the rest of this process."""
    from tests.sandbox.rehearsal_card import RehearsalCard, Scenario
    from vllm_aiter_mla.kernels import device, stopwatch

    us = {name: [(1, 1.0)] for name in ("triton", "vllm", "aiter")}
    device.installed = RehearsalCard(Scenario("sm90", "NVIDIA H100 80GB HBM3", rocm=None, us=us))
    stopwatch.MIN_CALLS = stopwatch.MIN_SETS = 2
    {VALUES: _interpret, LAUNCHES: _write_down}[kind]()


def _interpret() -> None:
    import triton.language as tl
    from triton.runtime.driver import driver

    from tests.sandbox import interpreter
    from vllm_aiter_mla.kernels.triton import tiles

    interpreter.install()
    interpreter.record_launches()
    tiles.TABLE["interpreter"] = tiles.TABLE["sm90"]
    # AITER assumes a stride above 0 that it then passes as 0, and asks for the card while it is imported.
    tl.assume = lambda fact: None
    driver.set_active(SimpleNamespace(get_current_target=lambda: SimpleNamespace(arch=90)))  # type: ignore[arg-type]


def _write_down() -> None:
    import torch

    from tools import cuda_driver

    cuda_driver.install(Path(tempfile.mkdtemp(prefix="aiter-mla-")))
    # Nothing looks at values here, and a CPU would take minutes for them.
    torch.randn = lambda *size, dtype=None, **_: torch.zeros(*size, dtype=dtype)  # type: ignore[assignment,misc]
    torch.bmm = lambda a, b, out=None: a.new_empty((*a.shape[:2], b.shape[2])) if out is None else out  # type: ignore[assignment]


def recorded(kernel: Any) -> Any:
    """Return a kernel whose launches the card of values notes, as it does those of the package's own."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return kernel
    from tests.sandbox import interpreter

    return interpreter.Recorded(kernel)
