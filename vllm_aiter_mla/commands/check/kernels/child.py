# SPDX-License-Identifier: Apache-2.0
"""The process that verifies one back end, and tells its results as they come."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.check.options import KernelOptions, Weights
from vllm_aiter_mla.kernels.platform import detect_platform
from vllm_aiter_mla.verify import session
from vllm_aiter_mla.verify.cases import REAL, TINY
from vllm_aiter_mla.verify.results import Result, Verification

STARTED = "started"
"""The status of a result that is told before its case runs."""


@dataclass(frozen=True, slots=True)
class KernelsRequest:
    """What is verified; ``options.backend`` is not read, as each back end has its process."""

    options: KernelOptions
    sizes: Mapping[str, int]  # fields of a ``Geometry``; empty for the default of the machine
    weights: Weights | None  # format of the absorb weights in every variant; None for that of each variant
    on_cpu: bool
    model: str | None  # MODEL of the command that repeats a failure
    repeat_words: tuple[str, ...]  # further words of that command


def verify_back_end(request: KernelsRequest, backend: str) -> Verification:
    """Verify one back end in this process; return the record.

    Told are: the record without results, then before each case a result that is ``STARTED``, and after it its result.

    Raises:
        NotHereError: torch sees no GPU here, and none of a CPU is asked for.
    """
    options, weights = request.options, request.weights
    geometry = replace(TINY if options.small else REAL, **request.sizes) if request.sizes else None
    this_session = session.Session(
        **(asdict(options) | {"backend": (backend,)}),
        geometry=geometry,
        weight=weights.key(detect_platform().fp8) if weights else None,
        device="cpu" if request.on_cpu else "gpu",
        model=request.model or "",
        again=request.repeat_words,
    )
    process.send(this_session.record())
    for item in this_session.items:
        started = Result(
            item.case.name, item.variant.name, item.backend, this_session.engine.name, item.seed, STARTED
        )  # fmt: skip
        process.send(replace(started, command=this_session.command(started)))
        process.send(this_session.run_one(item))
    return this_session.record()
