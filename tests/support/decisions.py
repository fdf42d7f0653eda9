"""Decisions about layers, from tuples."""

from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.decided import Decision, RejectedKernel, Span, Spans


def spans(*kernels: tuple[int, int, str]) -> Spans:
    """Spans from (first, last, kernel) in tokens."""
    return tuple(Span(*each) for each in kernels)


def decision(
    *kernels: tuple[int, int, str], skip: Skip | None = None, rejected_kernels: tuple[RejectedKernel, ...] = ()
) -> Decision:
    """A decision from (first, last, kernel) in tokens."""
    return Decision(spans(*kernels), skip, rejected_kernels)
