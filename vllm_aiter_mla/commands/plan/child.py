# SPDX-License-Identifier: Apache-2.0
"""The process that makes the plans of one model for several deployments: it imports vLLM once.

vLLM keeps much of a config, so each plan of several is made in a fork of its own.
"""

import gc
import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from vllm_aiter_mla.admission import LayerView
from vllm_aiter_mla.commands.compat import rocm_config
from vllm_aiter_mla.commands.plan import answer, build, kernels
from vllm_aiter_mla.commands.plan.model import Variables
from vllm_aiter_mla.commands.plan.record import PASSED_ON, Plan
from vllm_aiter_mla.settings import Settings

Made = TypeVar("Made")


def plan_each(folder: Path, deployments: Sequence[Sequence[str]], arch: str | None, variables: Variables) -> list[Plan]:
    """Return a plan for the options of each deployment.

    Raises:
        NotKnownError, ValueError: as ``ask.ask_for_plans`` raises it.
        RuntimeError: likewise; no other error is raised, so that the caller's process can raise each.
    """
    try:
        vllm = answer.load_vllm(arch)

        def plan(arguments: Sequence[str]) -> Plan:
            return build.record_of(answer.ask_vllm(folder, arguments), vllm, variables)

        if len(deployments) == 1:
            return [plan(deployments[0])]
        with suppress(Exception):  # it only saves time
            warm()
        return [call_in_fork(partial(plan, arguments)) for arguments in deployments]
    except Exception as error:
        raise picklable_error(error) from error


def picklable_error(error: BaseException) -> Exception:
    """Return an error that stands for another one and that another process can raise."""
    if isinstance(error, PASSED_ON) and type(error) in PASSED_ON:  # a class that is derived from one may not be there
        return error
    return ValueError(str(error)) if isinstance(error, ValueError) else RuntimeError(f"{type(error).__name__}: {error}")


def warm() -> None:
    """Import what most plans need, so that no fork does."""
    rocm_config.import_what_plans_need()
    kernels.planned("gfx950", Settings(), LayerView(model_dtype="bfloat16"), "plain", 16, 1024)
    gc.freeze()  # a fork then neither copies nor looks through what is imported


def call_in_fork(make: Callable[[], Made]) -> Made:
    """Return what ``make`` returns in a fork of this process, or raise its error.

    Raises:
        RuntimeError: the fork ended without either.
    """
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        with suppress(BaseException), os.fdopen(writes, "wb") as out:
            pickle.dump(_returned_or_raised(make), out)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as read:
        pickled = read.read()
    os.waitpid(child, 0)
    try:
        returned, error = pickle.loads(pickled)
    except (EOFError, pickle.UnpicklingError):
        raise RuntimeError("vLLM ended without an answer; --verbose shows its log") from None
    if error is not None:
        raise error
    return returned


def _returned_or_raised(make: Callable[[], Made]) -> tuple[Made | None, Exception | None]:
    """Return what ``make`` returns and None, or None and its error."""
    try:
        return make(), None
    except Exception as error:
        return None, picklable_error(error)
