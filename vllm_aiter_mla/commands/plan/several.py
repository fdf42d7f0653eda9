# SPDX-License-Identifier: Apache-2.0
"""Plans of one model with several sets of options, by one process: vLLM is imported once.

vLLM keeps much of a config, so each plan of several is made in a fork of its own.
"""

import gc
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from vllm_aiter_mla.admission import LayerView
from vllm_aiter_mla.commands.compat import rocm_config
from vllm_aiter_mla.commands.plan import answer, build, kernels
from vllm_aiter_mla.commands.plan.model import NotKnownError
from vllm_aiter_mla.commands.plan.record import Plan
from vllm_aiter_mla.settings import Settings


def plans(
    folder: Path, asked: Sequence[Sequence[str]], arch: str, variables: Mapping[str, tuple[str, str]]
) -> list[Plan | Exception]:
    """Return for each set of options the plan, or the error that ``model.ask`` raises."""
    try:
        vllm = answer.load(arch)
    except Exception as error:
        return [failure(error)]

    def planned(arguments: Sequence[str]) -> Plan | Exception:
        try:
            return build.build(answer.answer(folder, arguments), vllm, variables)
        except Exception as error:
            return failure(error)

    if len(asked) == 1:
        return [planned(asked[0])]
    with suppress(Exception):  # it only saves time
        warm()
    return [forked(partial(planned, arguments)) for arguments in asked]


def failure(error: BaseException) -> Exception:
    """Return an error that can be pickled: another process raises it."""
    if isinstance(error, NotKnownError):
        return error
    return ValueError(str(error)) if isinstance(error, ValueError) else RuntimeError(f"{type(error).__name__}: {error}")


def warm() -> None:
    """Import what most plans need, so that no fork does."""
    rocm_config.import_what_plans_need()
    kernels.planned("gfx950", Settings(), LayerView(model_dtype="bfloat16"), "plain", 16, 1024)
    gc.freeze()  # a fork then neither copies nor looks through what is imported


def forked(make: Callable[[], Any]) -> Any:
    """Return what ``make`` returns in a fork of this process, or a RuntimeError if that ends without an answer."""
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        with suppress(BaseException), os.fdopen(writes, "wb") as out:
            pickle.dump(make(), out)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as read:
        pickled = read.read()
    os.waitpid(child, 0)
    try:
        return pickle.loads(pickled)
    except (EOFError, pickle.UnpicklingError):
        return RuntimeError("vLLM ended without an answer; --verbose shows its log")
