# SPDX-License-Identifier: Apache-2.0
"""The record of a plan, which the step ``plan`` writes to JSON.

This module imports no torch. ``schemas.json`` describes the fields.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.decided import RejectedKernel, Span
from vllm_aiter_mla.kernels.formulas import Launch
from vllm_aiter_mla.settings import Settings

PlanEnvironment = Mapping[str, tuple[str, str]]
"""The environment of a plan: of each variable that is set, the value and its origin.

The origin is "--env", "environment" (of this process) or "default" (assumed, because nobody set the variable)."""


def server_environment(plan_environment: PlanEnvironment) -> dict[str, str]:
    """Return the environment of a server: that of this process, overridden by the variables of the plan."""
    return {**os.environ, **{name: value for name, (value, _) in plan_environment.items()}}


class NotKnownError(RuntimeError):
    """There is no plan, because vLLM fails on this machine. No option is wrong."""


FORWARDED_ERRORS = (NotKnownError, ValueError, RuntimeError)
"""Errors that the child process sends to its parent unchanged."""


def is_fp8_cache(kv_cache_dtype: str) -> bool:
    """Return whether a KV cache of this type holds fp8. The type has vLLM's name, such as "fp8_e4m3"."""
    return kv_cache_dtype.startswith("fp8")


@dataclass(frozen=True)
class LayerKindRecord:
    """Layers of one kind, as the JSON shows a ``LayerKind``. Widths are numbers of values."""

    count: int  # of such layers
    heads: int  # of all ranks
    is_sparse: bool
    nope: int  # un-rotated width of a query head
    rope: int  # rotated width of a query head, and width of k_pe
    latent: int  # width of the compressed KV vector
    v: int  # width of a value head
    has_rope: bool
    method: str  # the class that quantises ``kv_b_proj``
    weight: str  # the dtype of the weight of ``kv_b_proj``; empty if it is packed


@dataclass(frozen=True)
class Model:
    """The model of a plan. The last four fields are the origin of its config, as in ``config_source.ConfigSource``."""

    architecture: str
    is_mla: bool
    dtype: str
    num_layers: int
    max_position: int
    listed_layers: int  # MLA layers that the config lists
    notes: tuple[str, ...] = ()  # how the config was read
    kinds: tuple[LayerKindRecord, ...] = ()  # the most frequent first
    name: str = ""
    source: str = ""
    basis: str = ""
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanOptions:
    """The options of a plan, from vLLM's finished config."""

    tp: int
    pp: int
    dp: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int | None
    num_drafts: int
    kv_cache_dtype: str
    dcp: int
    pcp: int
    enforce_eager: bool
    mode: str
    dtype: str
    settings: Settings
    attention: str = ""  # vLLM's back end
    connectors: tuple[str, ...] = ()  # of KV transfer, by name
    layerwise: bool = False  # a connector prevents full graphs
    sleep: bool = False  # --enable-sleep-mode


@dataclass(frozen=True)
class CompileRanges:
    """Compile ranges, (first, last) in tokens; the passes would rewrite the first ``num_within_limit`` ones."""

    ranges: tuple[tuple[int, int], ...]
    num_within_limit: int
    note: str


@dataclass(frozen=True)
class CapturedSizes:
    """Captured sizes in tokens, inside and outside the decode limit. ``full``: those inside that have full graphs."""

    within_limit: tuple[int, ...]
    above_limit: tuple[int, ...]
    note: str
    full: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerCounts:
    """Numbers of layers."""

    mla: int  # with MLA, those of the draft included
    drafts: int  # with MLA, of the draft
    total: int  # of the model, with or without MLA
    engaged: int  # that would engage


@dataclass(frozen=True)
class PlanSpan(Span):
    """Token counts at which one variant of a kernel would run."""

    detail: str  # the variant, in words
    rejected_kernels: tuple[RejectedKernel, ...]  # kernels that precede this one in the static order


@dataclass(frozen=True)
class Cost:
    """Launches and bytes of one path."""

    launches: tuple[Launch, ...]  # of one layer
    launches_per_step: int  # of all layers
    bytes: int  # moved by one layer


@dataclass(frozen=True)
class Figures:
    """Launches and bytes by formula, of the most frequent kind of layer."""

    num_layers: int  # of that kind
    by_tokens: dict[int, dict[str, Cost]]  # by number of tokens, and path
    q_prepared_bytes: int  # the largest prepared query
    table_halves_bytes: int  # the copy of one rotary table that AITER's path keeps


@dataclass(frozen=True)
class KnownIssue:
    """A known issue of other code in the server that concerns a plan."""

    id: str
    effect: str
    state: str
    remedy: str
    link: str


@dataclass(frozen=True)
class Plan:
    """A plan: which layers would engage, with which kernels, or why not."""

    plugin: str
    vllm: str
    model: Model
    arch: str
    options: PlanOptions
    environment: dict[str, tuple[str, str]]  # value and origin by name
    heads_per_rank: int
    absorb_weight: str | None
    absorb_weights: dict[str, int]
    limit: int
    integration: str
    passes_skip: Skip | None
    compile_ranges: CompileRanges
    captures: CapturedSizes
    outcome: str
    layers: LayerCounts
    reasons: tuple[Skip, ...]
    kernels: tuple[PlanSpan, ...] | None
    figures: Figures | None
    assumptions: tuple[str, ...]
    known_issues: tuple[KnownIssue, ...] = ()  # empty if the shape is not known
    warnings: tuple[str, ...] = ()  # about input that is probably a typing mistake
    evidence: files.Stamp = files.stamp_field("plan")

    @property
    def has_fp8_cache(self) -> bool:
        """Whether the KV cache is in fp8."""
        return is_fp8_cache(self.options.kv_cache_dtype)
