# SPDX-License-Identifier: Apache-2.0
"""Which kernel would run a layer at which batch size: the server's own decision, from planned facts."""

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from vllm_aiter_mla.admission import OVERFLOW, LayerView
from vllm_aiter_mla.commands.plan.record import PlannedSpan, is_fp8_cache
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

# A plan is made for the ROCm release that the AITER path needs; the step machine looks at the installed one.
ROCM = (7, 0)


class PlannedBackends(Backends):
    """The back ends of a server on the card planned for: they answer as there and launch nothing."""

    def __init__(self, arch: str, settings: Settings) -> None:
        planned: dict[str, Factory] = FACTORIES | {
            "aiter": lambda card, _: AiterBackend(card, op=_never),
            "aiter-opt": lambda card, _: AiterBackend(card, op=_never, opt=True),
            "triton": lambda card, _: _PlannedTriton(arch),
            "vllm": lambda card, _: _PlannedVLLM(),
        }
        super().__init__(settings, Platform(arch, ROCM), planned)


class _PlannedTriton(triton.TritonBackend):
    """What it looks at on this machine is answered for the card planned for."""

    def __init__(self, arch: str) -> None:
        super().__init__()
        self._arch = arch

    @property
    def arch(self) -> str:
        return self._arch

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        return triton.refused_on(self.arch, inputs) or Binding(_never, self.tile(inputs, inputs.num_tokens).label)


class _PlannedVLLM(ReferenceBackend):
    """vLLM's own kernels take whatever the shared contract allows."""

    name = "vllm"


def planned(
    arch: str, settings: Settings, view: LayerView, format: str, block_size: int, limit: int
) -> tuple[Decision, tuple[PlannedSpan, ...]]:
    """Return the decision of a start that times nothing, and its spans cut where another variant of a kernel runs.

    ``view`` has the heads of one rank. ``format`` is that of its absorb weight, by the name of ``kernels.absorb``.
    ``block_size`` counts the tokens in a block of the KV cache, ``limit`` those of the largest decode step.
    """
    backends = PlannedBackends(arch, settings)
    shape = shape_of(view, format, block_size, backends.platform)
    points, offers = backends.offers(shape, limit)
    # By its sources AITER's op overflows to NaN. Every kernel is taken to pass its check.
    overflows = is_fp8_cache(view.kv_cache_dtype)
    checks = {name: Checked(writes_nan=overflows and name in AITER_KERNELS) for name in offers}
    facts = LayerFacts(None, offers, points, absorb.drops_values(format, view.qk_nope_head_dim))
    decision = decide(facts, checks, None, settings)
    return decision, tuple(_spans(backends, shape, facts, decision))


def _spans(backends: Backends, shape: LayerShape, facts: LayerFacts, decision: Decision) -> Iterator[PlannedSpan]:
    runs_nowhere, order = {other.kernel: other.reason for other in decision.passed_over}, list(facts.offers)
    entries = (entry for table in tiles.TABLE.values() for entry in table)
    borders = {PER_HEAD_TOKENS - 1, *(entry.tokens(shape.heads) for entry in entries)}
    for span in decision.kernels:
        # The last batch size before every border that a back end knows of.
        ends = sorted({border for border in borders if span.first <= border < span.last} | {span.last})
        point = next(point for point in facts.points if span.first <= point)
        earlier = order[: order.index(span.kernel)] if span.kernel in order else order
        reasons = ((name, runs_nowhere.get(name) or facts.offers[name].declines.get(point)) for name in earlier)
        passed_over, first = tuple(RejectedKernel(name, reason) for name, reason in reasons if reason), span.first
        details = ((end, _detail(backends, span.kernel, synthetic_inputs(shape, end, padded=None))) for end in ends)
        for detail, same in groupby(details, itemgetter(1)):
            *_, (last, _) = same
            yield PlannedSpan(first, last, span.kernel, detail, passed_over)
            first = last + 1


def _detail(backends: Backends, kernel: str, inputs: DecodeInputs) -> str:
    """Return which variant of a kernel runs such a call, in words."""
    backend = backends.get(kernel)
    if isinstance(backend, AiterBackend):
        overflow = f"; it {OVERFLOW}" if is_fp8(inputs.kv_cache.dtype) else ""
        return f"its {backend.kernel_of(inputs)} kernel{overflow}"
    if isinstance(backend, triton.TritonBackend):
        return f"tile {backend.kernel_of(inputs)}, by formula"
    return "the layer's own attention" if kernel == VLLM else f"the back end {kernel}"


def shape_of(view: LayerView, format: str, block_size: int, platform: Platform) -> LayerShape:
    """Return the shape of a planned layer, without memory: sizes and dtypes as vLLM hands them over."""
    act = getattr(torch, view.model_dtype)
    stored = platform.fp8 if is_fp8_cache(view.kv_cache_dtype) else act
    weight = (format, platform.fp8) if format == "fp8" else (format,)
    return LayerShape(
        view.num_heads, view.qk_nope_head_dim, stored, stored, block_size, False, act, "meta", view.kv_lora_rank,
        view.qk_rope_head_dim, weight,
    )  # fmt: skip


def _never(*arguments: Any) -> Any:
    raise AssertionError("a plan launches nothing")
