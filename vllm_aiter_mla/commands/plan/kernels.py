# SPDX-License-Identifier: Apache-2.0
"""Which kernel would take a layer at which batch size: the selector's own answers, on operands without memory."""

from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch

from vllm_aiter_mla.admission import OVERFLOW, LayerView
from vllm_aiter_mla.commands.plan.record import KernelSpan
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
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.settings import Settings

# A plan is made for the ROCm release that the AITER path needs; doctor looks at the installed one.
ROCM = (7, 0)


class PlannedLayer(Layer):
    """A layer of a server on the card planned for: its back ends answer as there and launch nothing."""

    def __init__(self, arch: str, settings: Settings) -> None:
        planned: dict[str, Factory] = FACTORIES | {
            "aiter": lambda card, _: AiterBackend(card, op=_never),
            "aiter-opt": lambda card, _: AiterBackend(card, op=_never, opt=True),
            "triton": lambda card, _: _PlannedTriton(arch),
            "vllm": lambda card, _: _PlannedVLLM(),
        }
        super().__init__(
            SimpleNamespace(_vllm_config=SimpleNamespace()), Backends(settings, Platform(arch, ROCM), planned)
        )


class _PlannedTriton(triton.TritonBackend):
    """What it looks at on this machine is answered for the card planned for."""

    def __init__(self, arch: str) -> None:
        super().__init__()
        self._arch = arch

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        reason = triton.refused_on(self._arch, inputs)
        if reason is not None:
            return reason
        return Binding(_never, tiles.tile_for(self._arch, inputs.num_tokens, inputs.num_heads).label)


class _PlannedVLLM(ReferenceBackend):
    """vLLM's own kernels take whatever the shared contract allows."""

    name = "vllm"


def spans(
    arch: str, settings: Settings, view: LayerView, format: str, block_size: int, limit: int
) -> tuple[KernelSpan, ...] | str:
    """Return the decode limit ``1..limit`` cut where the answer changes, or why no fused kernel runs on that card.

    Args:
        arch: the card.
        settings: the plugin's options.
        view: the layer, with the heads of one rank.
        format: of its absorb weight, by the name of ``kernels.absorb``.
        block_size: tokens in a block of the KV cache.
        limit: the decode limit in tokens.
    """
    chooser = PlannedLayer(arch, settings)
    if (missing := chooser.no_kernel()) is not None:
        return missing.message
    if settings.kernel == "auto" and view.kv_cache_dtype.startswith("fp8"):
        for name in AITER_KERNELS:
            chooser.refuse_kernel(name, f"by its sources it {OVERFLOW}")
    # The last batch size before every border that a back end knows of, up to the limit.
    entries = (entry for table in tiles.TABLE.values() for entry in table)
    borders = {PER_HEAD_TOKENS - 1, *(entry.tokens(view.num_heads) for entry in entries)}
    points = sorted({border for border in borders if 0 < border < limit} | {limit})
    answers = (at(chooser, operands(view, format, block_size, chooser.backends.platform, point)) for point in points)
    found: list[KernelSpan] = []
    # The reasons of skips name token counts, so they may differ where the same kernel runs.
    for _, same in groupby(answers, lambda one: (one.kernel, one.detail, [name for name, _ in one.skips])):
        alike = list(same)
        start = found[-1].last + 1 if found else 1
        found.append(replace(alike[0], first=start, last=alike[-1].last))
    return tuple(found)


def at(chooser: PlannedLayer, inputs: DecodeInputs) -> KernelSpan:
    """Return the choice for one batch size."""
    choice, tokens = chooser.choose(inputs), inputs.num_tokens
    backend, detail = choice.backend, ""
    if isinstance(backend, AiterBackend):
        detail = f"its {backend.kernel_of(inputs)} kernel"
        detail += f"; it {OVERFLOW}" if is_fp8(inputs.kv_cache.dtype) else ""
    elif isinstance(backend, triton.TritonBackend):
        detail = f"tile {backend.kernel_of(inputs)}, by formula"
    elif backend is not None:
        detail = "the layer's own attention"
    return KernelSpan(tokens, tokens, choice.name, detail, choice.passed_over)


def operands(view: LayerView, format: str, block_size: int, platform: Platform, tokens: int) -> DecodeInputs:
    """Return a decode step's operands on the ``meta`` device: shapes, strides and dtypes as vLLM hands them over."""
    act = getattr(torch, view.model_dtype)
    stored = platform.fp8 if view.kv_cache_dtype.startswith("fp8") else act
    weight = (format, platform.fp8) if format == "fp8" else (format,)
    shape = LayerShape(
        view.num_heads, view.qk_nope_head_dim, stored, stored, block_size, False, act, "meta", view.kv_lora_rank,
        view.qk_rope_head_dim, weight,
    )  # fmt: skip
    return synthetic_inputs(shape, tokens, padded=None)


def _never(*arguments: Any) -> Any:
    raise AssertionError("a plan launches nothing")
