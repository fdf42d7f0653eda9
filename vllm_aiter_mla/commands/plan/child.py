# SPDX-License-Identifier: Apache-2.0
"""Make the plans of one model for several deployments, in a process that imports vLLM once.

vLLM caches parts of a config, so several plans are each made in a fork.
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
from vllm_aiter_mla.commands.plan import build, kernels, vllm_facts
from vllm_aiter_mla.commands.plan.record import FORWARDED_ERRORS, Plan, PlanEnvironment
from vllm_aiter_mla.settings import Settings

Returned = TypeVar("Returned")


def plan_deployments(
    folder: Path, deployments: Sequence[Sequence[str]], arch: str | None, plan_environment: PlanEnvironment
) -> list[Plan]:
    """Return a plan for the options of each deployment.

    Raises:
        NotKnownError, ValueError: as ``planner.make_plans`` raises it.
        RuntimeError: vLLM raised something else. The caller's process can raise all of these errors.
    """
    try:
        vllm = vllm_facts.load_vllm(arch)

        def plan_deployment(arguments: Sequence[str]) -> Plan:
            return build.make_plan(vllm_facts.collect_facts(folder, arguments), vllm, plan_environment)

        if len(deployments) == 1:
            return [plan_deployment(deployments[0])]
        with suppress(Exception):  # a plan works without it, only slower
            preload()
        return [call_in_fork(partial(plan_deployment, arguments)) for arguments in deployments]
    except Exception as error:
        raise picklable_error(error) from error


def picklable_error(error: BaseException) -> Exception:
    """Return an error with the same message that another process can raise."""
    # The other process may lack a derived class, so only these classes themselves are sent.
    if isinstance(error, FORWARDED_ERRORS) and type(error) in FORWARDED_ERRORS:
        return error
    return ValueError(str(error)) if isinstance(error, ValueError) else RuntimeError(f"{type(error).__name__}: {error}")


def preload() -> None:
    """Import what most plans need, so that no fork imports it."""
    rocm_config.preload_vllm()
    kernels.decide_kernels("gfx950", Settings(), LayerView(model_dtype="bfloat16"), "plain", 16, 1024)
    gc.freeze()  # forks then neither copy nor scan the imported modules


def call_in_fork(function: Callable[[], Returned]) -> Returned:
    """Call ``function`` in a fork of this process. Return its result, or raise its error.

    Raises:
        RuntimeError: the fork ended without a result or an error.
    """
    read_end, write_end = os.pipe()
    if (child_pid := os.fork()) == 0:
        with suppress(BaseException), os.fdopen(write_end, "wb") as pipe:
            pickle.dump(_result_or_error(function), pipe)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        payload = pipe.read()
    os.waitpid(child_pid, 0)
    try:
        result, error = pickle.loads(payload)
    except (EOFError, pickle.UnpicklingError):
        raise RuntimeError("vLLM ended without a plan; --verbose shows its log") from None
    if error is not None:
        raise error
    return result


def _result_or_error(function: Callable[[], Returned]) -> tuple[Returned | None, Exception | None]:
    """Return the result of ``function`` and None, or None and its error."""
    try:
        return function(), None
    except Exception as error:
        return None, picklable_error(error)
