"""The one place that imports AITER and hands out its op."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

import torch

from vllm_aiter_mla.kernels.aiter.locate import OP, REQUIRED, locate_aiter, signature_problem

Op = Callable[..., None]
Gemm = Callable[..., torch.Tensor]

FP8_GEMM = "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant"
# Where vLLM imports it from, and where AITER's sources hold it since they sort their GEMMs.
FP8_GEMM_HOMES = ("aiter.ops.triton", "aiter.ops.triton.gemm.batched")


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


def load_fp8_gemm() -> Gemm | str:
    """AITER's batched GEMM over fp8 weights, which vLLM's absorb step calls, or why there is none. Never raises."""
    problems = []
    for home in FP8_GEMM_HOMES:
        try:
            return cast(Gemm, getattr(importlib.import_module(f"{home}.{FP8_GEMM}"), FP8_GEMM))
        except Exception as error:  # as for the op: its modules look at the card and at Triton when imported
            problems.append(f"{type(error).__name__}: {error}")
    return f"AITER's fp8 batched GEMM cannot be imported: {problems[-1]}"


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
