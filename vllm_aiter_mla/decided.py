# SPDX-License-Identifier: Apache-2.0
"""What was decided for a layer: which kernel runs at how many tokens, or why none of ours does.

``serving.decision`` decides. Kernels, start-up, status files and plans share these values. Imports no torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from vllm_aiter_mla.admission import Skip

VLLM = "vllm"
"""Name of vLLM's own kernels among the kernels."""


@dataclass(frozen=True)
class Span:
    """The token counts from ``first`` to ``last``, at which one kernel runs."""

    first: int
    last: int
    kernel: str  # its name; among tuned tiles the label of a tile, which is a variant of our Triton kernel

    @property
    def tokens(self) -> str:
        """The token counts as text, such as "1..64"."""
        return f"{self.first}..{self.last}"


Spans = tuple[Span, ...]
"""Ascending and without a gap from 1 token on."""


def kernel_at(spans: Sequence[Span], tokens: int) -> str:
    """Return what runs at ``tokens``, beyond the last span what runs in that; "" without spans."""
    return next((span.kernel for span in spans if tokens <= span.last), spans[-1].kernel if spans else "")


def merge_spans(spans: Iterable[Span]) -> Spans:
    """Return the spans, neighbours with the same kernel as one."""
    found: list[Span] = []
    for span in spans:
        if found and found[-1].kernel == span.kernel:
            found[-1] = replace(found[-1], last=span.last)
        else:
            found.append(Span(span.first, span.last, span.kernel))
    return tuple(found)


@dataclass(frozen=True)
class RejectedKernel:
    """A kernel that does not run, and why."""

    kernel: str
    reason: str
    aborted: bool = False  # the reason is that an earlier start ended in the kernel's first call


@dataclass(frozen=True)
class Decision:
    """What runs a layer."""

    kernels: Spans  # empty: vLLM's own graph runs at every token count
    skip: Skip | None  # why ``kernels`` is empty
    passed_over: tuple[RejectedKernel, ...]  # each candidate that runs at no token count

    def at(self, tokens: int) -> str:
        """Return what runs at ``tokens``; beyond the last span what runs in that."""
        return kernel_at(self.kernels, tokens) or VLLM

    @property
    def our_kernels(self) -> tuple[str, ...]:
        """The kernels of ours that run at some token count, by token count."""
        return tuple(dict.fromkeys(span.kernel for span in self.kernels if span.kernel != VLLM))

    @property
    def first_of_ours(self) -> str:
        """The first kernel of ours that runs at some token count, or ""."""
        return next(iter(self.our_kernels), "")
