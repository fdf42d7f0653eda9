# SPDX-License-Identifier: Apache-2.0
"""What was decided for a layer and why: its timing, which kernel runs at how many tokens, and what it has run so far.

``serving.decision`` decides. Kernels, start-up, status files and plans share these values. Imports no torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vllm_aiter_mla.admission import Skip

VLLM = "vllm"
"""Name of vLLM's own kernels, where kernels are named."""


@dataclass(frozen=True)
class Span:
    """The token counts from ``first`` to ``last``, at which one kernel runs."""

    first: int
    last: int
    kernel: str  # its name; among tuned tiles the label of a tile, which is a variant of our Triton kernel

    @property
    def tokens_text(self) -> str:
        """The token counts as text, such as "1..64"."""
        return f"{self.first}..{self.last}"


Spans = tuple[Span, ...]
"""Spans in ascending order, without a gap from 1 token on."""


def kernel_at(spans: Sequence[Span], tokens: int) -> str:
    """Return the kernel of a span at ``tokens``. Beyond the last span, return its kernel; without spans, ""."""
    return next((span.kernel for span in spans if tokens <= span.last), spans[-1].kernel if spans else "")


def merge_spans(spans: Iterable[Span]) -> Spans:
    """Return the spans, with neighbours that have the same kernel merged into one."""
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].kernel == span.kernel:
            merged[-1] = replace(merged[-1], last=span.last)
        else:
            merged.append(Span(span.first, span.last, span.kernel))
    return tuple(merged)


@dataclass(frozen=True)
class RejectedKernel:
    """A kernel that does not run, and why."""

    kernel: str
    reason: str
    aborted: bool = False  # whether the reason is that an earlier start ended in a marked call of it


@dataclass(frozen=True)
class Decision:
    """Which kernels run a layer."""

    kernel_spans: Spans  # if empty, vLLM's own graph runs at every token count
    skip: Skip | None  # why ``kernel_spans`` is empty
    rejected_kernels: tuple[RejectedKernel, ...]  # each candidate that runs at no token count

    def kernel_at(self, tokens: int) -> str:
        """Return the kernel that runs the layer at ``tokens``. Beyond the last span, return its kernel."""
        return kernel_at(self.kernel_spans, tokens) or VLLM

    @property
    def our_kernels(self) -> tuple[str, ...]:
        """The kernels of ours that run at some token count, in the order of their token counts."""
        return tuple(dict.fromkeys(span.kernel for span in self.kernel_spans if span.kernel != VLLM))

    @property
    def our_first_kernel(self) -> str:
        """The first of ``our_kernels``, or ""."""
        return next(iter(self.our_kernels), "")


class LayerState(NamedTuple):
    """What has become of one layer so far, as ``serving.layer.Layer.state`` returns it."""

    decision: Decision
    ran_kernel: str = ""  # the kernel that its fused op has run; "" if the op has run none
    # Kernels that may run the layer, if its op was called without a batch. vLLM runs no batch of a draft model while
    # it starts, so a draft's layer counts as engaged if one of these kernels has run for another layer.
    possible_kernels: tuple[str, ...] = ()
    skip: Skip | None = None  # why the layer runs vLLM's own code: by its decision, its graph or its last batch


@dataclass(frozen=True)
class ShapeTiming:
    """What was timed for one layer shape at start-up, and which kernels were chosen.

    Raises:
        ValueError: nothing was timed, or a count lacks the figure of vLLM's own kernels or of the chosen kernel.
    """

    shape: str  # in words
    layers: tuple[str, ...]
    chosen_spans: Spans
    medians_us: dict[int, dict[str, float]]  # microseconds per layer by token count and kernel, on this rank
    kept_since: str = ""  # when an earlier start took the figures; empty if this start did

    def __post_init__(self) -> None:
        required = {tokens: {VLLM, kernel_at(self.chosen_spans, tokens)} for tokens in self.medians_us}
        if not self.medians_us or any(required[tokens] - figures.keys() for tokens, figures in self.medians_us.items()):
            raise ValueError("a figure is missing")
