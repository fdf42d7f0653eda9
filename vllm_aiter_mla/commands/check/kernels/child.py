# SPDX-License-Identifier: Apache-2.0
"""The process that verifies one back end, and sends each result to its caller at once."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import torch

from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.check.options import KernelOptions, WeightFormat
from vllm_aiter_mla.commands.check.timing.child import padded_heads
from vllm_aiter_mla.kernels.platform import detect_platform
from vllm_aiter_mla.verify import session
from vllm_aiter_mla.verify.cases import REAL, TINY
from vllm_aiter_mla.verify.results import Result, Verification

STARTED = "started"
"""The status of a result that is sent before its case runs."""


@dataclass(frozen=True, slots=True)
class KernelsRequest:
    """What to verify. ``options.backend`` is not read, because each back end has a process of its own."""

    options: KernelOptions
    geometry_sizes: Mapping[str, int]  # fields of a ``Geometry`` but ``out_heads``; empty for the machine's default
    weight_format: WeightFormat | None  # of the absorb weights in every variant; None if each variant has its own
    uses_cpu: bool
    model: str | None  # MODEL in the command that repeats a failure
    repeat_arguments: tuple[str, ...]  # further arguments of that command
    activation_dtype: str = "bfloat16"
    # Whether the model's cache is fp8, on which it depends whether vLLM pads the heads; None without a plan for a GPU
    has_fp8_cache: bool | None = None


def verify_backend(request: KernelsRequest, backend: str) -> Verification:
    """Verify one back end in this process; return the record.

    Send the caller the record without results first. Then send a ``STARTED`` result before each case, and the result
    after the case.

    Raises:
        NotHereError: torch sees no GPU here, and ``request.uses_cpu`` is not set.
    """
    options, weight_format, sizes = request.options, request.weight_format, dict(request.geometry_sizes)
    if request.has_fp8_cache is not None:
        sizes["out_heads"] = padded_heads(sizes["heads"], request.has_fp8_cache)
    geometry = replace(TINY if options.small else REAL, **sizes) if sizes else None
    backend_session = session.Session(
        **(asdict(options) | {"backend": (backend,)}),
        geometry=geometry,
        weight=weight_format.absorb_key(detect_platform().fp8) if weight_format else None,
        act=getattr(torch, request.activation_dtype),
        device="cpu" if request.uses_cpu else "gpu",
        model=request.model or "",
        again=request.repeat_arguments,
    )
    process.send_value(backend_session.record())
    for item in backend_session.items:
        started = Result(
            item.case.name, item.variant.name, item.backend, backend_session.engine.name, item.seed, STARTED
        )  # fmt: skip
        process.send_value(replace(started, command=backend_session.command(started)))
        process.send_value(backend_session.run_one(item))
    return backend_session.record()
