"""vLLM's switches in the environment, as the installed release reads them: their defaults change between releases."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

USE_AITER, USE_AITER_MLA = "VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MLA"
FP8_BMM, FP4_BMM = "VLLM_ROCM_USE_AITER_FP8BMM", "VLLM_ROCM_USE_AITER_FP4BMM"
BREAKABLE_GRAPHS, BATCH_INVARIANT = "VLLM_USE_BREAKABLE_CUDAGRAPH", "VLLM_BATCH_INVARIANT"
NO_MLA = "VLLM_MLA_DISABLE"
VARIABLES = (USE_AITER, USE_AITER_MLA, FP8_BMM, FP4_BMM, BREAKABLE_GRAPHS, BATCH_INVARIANT, NO_MLA)
"""What decides whether layers engage, and in which form vLLM holds their weights."""


def switched_on(name: str, env: Mapping[str, str] = {}) -> bool | None:
    """Whether vLLM takes the switch ``name`` as on in an environment ``env``; None where vLLM cannot be asked.

    Raises:
        ValueError: vLLM cannot read the value, and would not start; names both.
    """
    read = _reader(name)
    if read is None:
        return None
    saved = os.environ.pop(name, None)
    try:
        if name in env:
            os.environ[name] = env[name]
        return bool(read())
    except ValueError as error:
        raise ValueError(f"{name}={env.get(name, '')}: {error}") from error
    finally:
        os.environ.pop(name, None)
        if saved is not None:
            os.environ[name] = saved


def _reader(name: str) -> Callable[[], Any] | None:
    """vLLM's own function that reads the variable: it takes no argument, so the process's environment is its input."""
    try:
        from vllm import envs

        return envs.environment_variables[name]
    except Exception:  # vLLM is missing, breaks while it is imported, or does not know the variable
        return None
