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
from vllm_aiter_mla.commands.plan import answer as asking
from vllm_aiter_mla.commands.plan import build, kernels
from vllm_aiter_mla.commands.plan.record import Plan
from vllm_aiter_mla.settings import Settings


def answers(
    folder: Path, asked: Sequence[Sequence[str]], arch: str, variables: Mapping[str, tuple[str, str]]
) -> list[Plan | Exception]:
    """Return for each set of options the plan, or the error that ``model.ask`` raises."""
    try:
        about = asking.start(arch)
    except Exception as error:
        return [build.failure(error)]

    def one(arguments: Sequence[str]) -> Plan | Exception:
        try:
            return build.build(asking.answer(folder, arguments), about, variables)
        except Exception as error:
            return build.failure(error)

    if len(asked) == 1:
        return [one(asked[0])]
    with suppress(Exception):  # it only saves time
        warm()
    return [forked(partial(one, arguments)) for arguments in asked]


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
    with os.fdopen(reads, "rb") as answer:
        said = answer.read()
    os.waitpid(child, 0)
    try:
        return pickle.loads(said)
    except (EOFError, pickle.UnpicklingError):
        return RuntimeError("vLLM ended without an answer; --verbose shows its log")
