"""Cases with the Triton back end under Triton's interpreter, in a process of their own.

A process that interprets kernels cannot compile them, and has to be told before Triton is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import Any

from vllm_aiter_mla.verify.cases import Case
from vllm_aiter_mla.verify.runner import Options, Result
from vllm_aiter_mla.verify.setting import Variant

# A launch lasts milliseconds here: the long runs are short ones.
SOAK = 8
ENGINE = "eager replay, interpreted"


def run(cases: Sequence[Case], variants: Sequence[Variant], options: Options) -> Iterator[Result]:
    """The results of all cases with all variants, as they come.

    Raises:
        BrokenProcessPool: the process ended without finishing; what it said stands on standard error.
    """
    pairs = [(case, variant, options) for variant, case in product(variants, cases)]
    # A fresh process: this one may have imported Triton already.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=prepare) as pool:
        yield from pool.map(run_one, *zip(*pairs, strict=True))


def prepare() -> None:
    """The process, before its first case: Triton interprets, and each launch of its kernel is recorded as one."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from vllm_aiter_mla.kernels.triton import interpreter, launcher

    interpreter.install()
    torch.set_num_threads(1)
    launcher.decode_prep_kernel = _Recorded(launcher.decode_prep_kernel)


def run_one(case: Case, variant: Variant, options: Options) -> Result:
    """One case, in the process that interprets."""
    from vllm_aiter_mla.verify import backends, runner
    from vllm_aiter_mla.verify.engine import EagerEngine

    engine = EagerEngine()
    engine.name = ENGINE
    return runner.run_case(case, variant, backends.load("triton"), engine, options)


class _Recorded:
    """A kernel whose launches are recorded."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        from vllm_aiter_mla.verify.recording import launch_foreign

        launch = self._kernel[grid]
        return lambda *given, **named: launch_foreign("decode_prep_kernel", lambda: launch(*given, **named))
