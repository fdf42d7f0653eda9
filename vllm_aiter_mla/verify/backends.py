"""Which back ends can be verified on this machine, and where each runs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any, TypeAlias

import torch

from vllm_aiter_mla.backends import Backends
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.platform import detect_platform
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.settings import Settings
from vllm_aiter_mla.verify.cases import Item
from vllm_aiter_mla.verify.engine import EagerEngine, launch_foreign
from vllm_aiter_mla.verify.launches import first_line
from vllm_aiter_mla.verify.oracles import Finding
from vllm_aiter_mla.verify.runner import Result, run_case

Found: TypeAlias = KernelBackend | str | None
"""A new back end, or why there is none. None if it needs a process that interprets Triton."""
INTERPRETED = "eager replay, interpreted"


def find(name: str) -> Found:
    """Look for the back end ``name``. If that raises, the back end is missing, with the error as the reason."""
    finder = FINDERS[name]
    try:
        return finder()
    except Exception as error:  # importing a vendor's package may do anything
        return f"{type(error).__name__}: {error}"


def load(name: str) -> KernelBackend:
    """Return a new back end that ``find`` has found before. Raises RuntimeError if it is gone."""
    found = find(name)
    if not isinstance(found, KernelBackend):
        raise RuntimeError(f"{name}: {found or 'not in this process'}")
    return found


def _triton() -> Found:
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    from vllm_aiter_mla.kernels.triton.backend import TritonBackend

    return TritonBackend()


def _aiter() -> Found:
    return Backends(Settings(), detect_platform()).get("aiter")


FINDERS: dict[str, Callable[[], Found]] = {"reference": ReferenceBackend, "triton": _triton, "aiter": _aiter}
"""How to look for each back end, in the order in which they run; add your own."""


def run(item: Item, engine: EagerEngine) -> Result:
    """Run an item with a new back end, because state kept by one case could change the next.

    Triton's interpreter has a process of its own: a process that interprets kernels cannot compile them, and Triton
    must know before it is imported. If the process ends, this case fails and the next one starts a new process.
    """
    if item.here:
        return run_case(item, load(item.backend), engine)
    try:
        return _interpreter().submit(_run_interpreted, item).result()
    except BrokenProcessPool as error:
        _interpreter.cache_clear()
        broken = Result.of(item, INTERPRETED)
        broken.add([Finding("runs", f"the interpreting process ended: {first_line(error)}")], "start")
        return broken


@functools.cache
def _interpreter() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_prepare)


def _prepare() -> None:
    """Prepare the process: Triton interprets, and each launch of its kernel is recorded as one call."""
    os.environ["TRITON_INTERPRET"] = "1"
    from vllm_aiter_mla.kernels.triton import launcher
    from vllm_aiter_mla.verify import interpreter

    interpreter.install()
    torch.set_num_threads(1)
    launcher.decode_prep_kernel = _Recorded(launcher.decode_prep_kernel)


def _run_interpreted(item: Item) -> Result:
    engine = EagerEngine()
    engine.name = INTERPRETED
    return run_case(item, load(item.backend), engine)


class _Recorded:
    """A kernel whose launches are recorded."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        launch = self._kernel[grid]
        return lambda *given, **named: launch_foreign("decode_prep_kernel", lambda: launch(*given, **named))
