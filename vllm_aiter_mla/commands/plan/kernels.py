# SPDX-License-Identifier: Apache-2.0
"""Decide which kernel would run a layer at which batch size, by the server's own code."""

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from vllm_aiter_mla.admission import OVERFLOW, LayerView
from vllm_aiter_mla.commands.plan.record import PlanSpan, is_fp8_cache
from vllm_aiter_mla.decided import VLLM, Decision, RejectedKernel
from vllm_aiter_mla.kernels import absorb
from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.aiter.route import PER_HEAD_TOKENS
from vllm_aiter_mla.kernels.backend import Binding
from vllm_aiter_mla.kernels.formats import is_fp8
from vllm_aiter_mla.kernels.inputs import DecodeInputs, LayerShape, synthetic_inputs
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.kernels.triton import backend as triton
from vllm_aiter_mla.kernels.triton import tiles
from vllm_aiter_mla.serving.backends import AITER_KERNELS, FACTORIES, Backends, Factory
from vllm_aiter_mla.serving.decision import Checked, LayerFacts, decide
from vllm_aiter_mla.settings import Settings

# A plan assumes the ROCm release that AITER's path needs. The step ``machine`` checks the installed one.
ROCM = (7, 0)


class PlanBackends(Backends):
    """The back ends of a server on a card of ``arch``. They answer as on that card, and launch nothing."""

    def __init__(self, arch: str, settings: Settings) -> None:
        factories: dict[str, Factory] = FACTORIES | {
            "aiter": lambda card, _: AiterBackend(card, op=_raise_on_launch),
            "aiter-opt": lambda card, _: AiterBackend(card, op=_raise_on_launch, opt=True),
            "triton": lambda card, _: _PlanTriton(arch),
            VLLM: lambda card, _: _PlanVllm(),
        }
        super().__init__(settings, Platform(arch, ROCM), factories)


class _PlanTriton(triton.TritonBackend):
    """Our Triton back end, for a card of ``arch`` instead of this machine's."""

    def __init__(self, arch: str) -> None:
        super().__init__()
        self._arch = arch

    @property
    def arch(self) -> str:
        return self._arch

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        if reason := triton.refused_on(self.arch, inputs):
            return reason
        return Binding(_raise_on_launch, self.tile(inputs, inputs.num_tokens).label)


class _PlanVllm(ReferenceBackend):
    """vLLM's own kernels, which accept all inputs of the shared contract."""

    name = VLLM


def decide_kernels(
    arch: str, settings: Settings, view: LayerView, weight_format: str, block_size: int, limit: int
) -> tuple[Decision, tuple[PlanSpan, ...]]:
    """Return the decision of a start that times nothing, and its spans, one for each variant of a kernel.

    ``view`` has the heads of one rank. ``weight_format`` is that of its absorb weight, named as in ``kernels.absorb``.
    ``block_size`` is the number of tokens in a block of the KV cache, ``limit`` that of the largest decode step.
    """
    backends = PlanBackends(arch, settings)
    shape = layer_shape(view, weight_format, block_size, backends.platform)
    points, offers = backends.offers(shape, limit)
    # By its sources AITER's op overflows to NaN. A plan assumes that every kernel passes its check.
    has_fp8_cache = is_fp8_cache(view.kv_cache_dtype)
    checks = {name: Checked(writes_nan=has_fp8_cache and name in AITER_KERNELS) for name in offers}
    facts = LayerFacts(None, offers, points, absorb.drops_values(weight_format, view.qk_nope_head_dim))
    decision = decide(facts, checks, None, settings)
    return decision, tuple(_spans(backends, shape, facts, decision))


def _spans(backends: Backends, shape: LayerShape, facts: LayerFacts, decision: Decision) -> Iterator[PlanSpan]:
    """Yield the decision's spans, each cut where another variant of its kernel runs."""
    reason_by_kernel = {rejected.kernel: rejected.reason for rejected in decision.rejected_kernels}
    kernel_order = list(facts.offers)
    entries = (entry for table in tiles.TABLE.values() for entry in table)
    borders = {PER_HEAD_TOKENS - 1, *(entry.tokens(shape.heads) for entry in entries)}
    for span in decision.kernel_spans:
        # Where a back end may change its variant, the last batch size before that.
        ends = sorted({border for border in borders if span.first <= border < span.last} | {span.last})
        point = next(point for point in facts.points if span.first <= point)
        position = kernel_order.index(span.kernel) if span.kernel in kernel_order else None
        reasons = {
            name: reason_by_kernel.get(name) or facts.offers[name].declines.get(point)
            for name in kernel_order[:position]
        }
        rejected_kernels = tuple(RejectedKernel(name, reason) for name, reason in reasons.items() if reason)
        first = span.first
        details = ((end, _detail(backends, span.kernel, synthetic_inputs(shape, end, padded=None))) for end in ends)
        for detail, group in groupby(details, itemgetter(1)):
            *_, (last, _) = group
            yield PlanSpan(first, last, span.kernel, detail, rejected_kernels)
            first = last + 1


def _detail(backends: Backends, kernel: str, inputs: DecodeInputs) -> str:
    """Return the variant of a kernel that runs these inputs, in words."""
    backend = backends.get(kernel)
    if isinstance(backend, AiterBackend):
        overflow_text = f"; it {OVERFLOW}" if is_fp8(inputs.kv_cache.dtype) else ""
        return f"its {backend.kernel_of(inputs)} kernel{overflow_text}"
    if isinstance(backend, triton.TritonBackend):
        return f"tile {backend.kernel_of(inputs)}, by formula"
    return "the layer's own attention" if kernel == VLLM else f"the back end {kernel}"


def layer_shape(view: LayerView, weight_format: str, block_size: int, platform: Platform) -> LayerShape:
    """Return the shape of a layer on torch's ``meta`` device, with the sizes and dtypes that vLLM passes."""
    dtype = getattr(torch, view.model_dtype)
    cache_dtype = platform.fp8 if is_fp8_cache(view.kv_cache_dtype) else dtype
    absorb_key = (weight_format, platform.fp8) if weight_format == "fp8" else (weight_format,)
    return LayerShape(
        view.num_heads, view.qk_nope_head_dim, cache_dtype, cache_dtype, block_size, False, dtype, "meta",
        view.kv_lora_rank, view.qk_rope_head_dim, absorb_key,
    )  # fmt: skip


def _raise_on_launch(*arguments: Any) -> Any:
    raise AssertionError("a plan launches nothing")
