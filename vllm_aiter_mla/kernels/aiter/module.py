"""The one place that imports AITER and hands out its fused op."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from vllm_aiter_mla.kernels.aiter.locate import OP, REQUIRED, locate_aiter, signature_problem

Op = Callable[..., None]


class AiterUnavailableError(RuntimeError):
    """AITER cannot be used in this process; the message says why and what to do."""


def load_op() -> Op:
    """Import AITER and return its op, after checking the signature before and the schema after the import.

    ``torch.ops.aiter.<op>.default`` is what AITER's own Python function calls; taking it directly saves a frame per
    call. Its schema declares every tensor as written, which is why it never enters a compiled graph.

    Raises:
        AiterUnavailableError: absent, of another project, too old, too new, or its import failed.
    """
    found = locate_aiter()
    if found.reason is not None:
        raise AiterUnavailableError(found.reason)
    try:
        importlib.import_module("aiter")
        op = getattr(torch.ops.aiter, OP).default
    except Exception as error:  # AITER's import runs rocminfo, compilers and a registry: anything may come out
        raise AiterUnavailableError(f"`import aiter` failed: {type(error).__name__}: {error}") from error
    reason = schema_problem(op)
    if reason is not None:
        raise AiterUnavailableError(reason)
    return op


def schema_problem(op: Any) -> str | None:
    """Why the registered op cannot be called, or None.

    Another build may be registered than the source that was read: ``inspect.signature`` shows only
    ``(*args, **kwargs)`` of AITER's wrappers, the schema has the names.
    """
    arguments = op._schema.arguments
    mandatory = sum(not argument.has_default_value() for argument in arguments)
    reason = signature_problem(tuple(argument.name for argument in arguments), mandatory)
    if reason is not None:
        return f"the loaded op differs from its source: {reason}"
    tensors = len(REQUIRED) - 3
    known = arguments[: len(REQUIRED)]
    wrong = [a.name for i, a in enumerate(known) if str(a.type) != ("Tensor" if i < tensors else "bool")]
    return f"the loaded op takes other types for: {', '.join(wrong)}" if wrong else None
