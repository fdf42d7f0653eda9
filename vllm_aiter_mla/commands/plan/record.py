# SPDX-License-Identifier: Apache-2.0
"""The record of a plan, which the step ``plan`` has in JSON.

Imports no torch. ``schemas.json`` says what the fields mean.
"""

from dataclasses import dataclass

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.decided import RejectedKernel, Span
from vllm_aiter_mla.kernels.formulas import Launch
from vllm_aiter_mla.settings import Settings


class NotKnownError(RuntimeError):
    """There is no plan, because vLLM could not be asked on this machine: no option is wrong."""


PASSED_ON = (NotKnownError, ValueError, RuntimeError)
"""Errors that reach the caller of the process that plans as they are."""


def is_fp8_cache(kv_cache_dtype: str) -> bool:
    """Return whether a KV cache of this type holds fp8; the type is in vLLM's words, as in "fp8_e4m3"."""
    return kv_cache_dtype.startswith("fp8")


@dataclass(frozen=True)
class Kind:
    """Layers of one kind, with their heads over all ranks."""

    count: int
    heads: int
    is_sparse: bool
    nope: int
    rope: int
    latent: int
    v: int
    has_rope: bool
    method: str
    weight: str


@dataclass(frozen=True)
class Model:
    """What was planned for; the last four fields say where its config comes from, as ``model.Source`` does."""

    architecture: str
    is_mla: bool
    dtype: str
    layers: int
    max_position: int
    listed_layers: int
    notes: tuple[str, ...] = ()  # how the config was read
    kinds: tuple[Kind, ...] = ()  # the most frequent first
    name: str = ""
    source: str = ""
    basis: str = ""
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options:
    """What the options became."""

    tp: int
    pp: int
    dp: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int | None
    num_drafts: int | None
    kv_cache_dtype: str
    dcp: int
    pcp: int
    enforce_eager: bool
    mode: str
    dtype: str
    settings: Settings
    attention: str = ""  # vLLM's back end
    connectors: tuple[str, ...] = ()  # of KV transfer, by name
    layerwise: bool = False  # a connector takes the full graphs
    sleep: bool = False  # --enable-sleep-mode


@dataclass(frozen=True)
class Ranges:
    """Compile ranges, (first, last) in tokens; the passes would rewrite the first ``inside`` ones."""

    ranges: tuple[tuple[int, int], ...]
    inside: int
    note: str


@dataclass(frozen=True)
class Captures:
    """Captured sizes in tokens, up to the decode limit and above it; ``full``: those inside of full graphs."""

    inside: tuple[int, ...]
    outside: tuple[int, ...]
    note: str
    full: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layers:
    """Numbers of layers."""

    mla: int
    drafts: int
    total: int
    engaged: int


@dataclass(frozen=True)
class PlannedSpan(Span):
    """Token counts at which one variant of a kernel would run."""

    detail: str  # the variant, in words
    passed_over: tuple[RejectedKernel, ...]  # kernels that come before it in the static order


@dataclass(frozen=True)
class Cost:
    """What one path costs: of a layer, and of a step."""

    launches: tuple[Launch, ...]
    launches_per_step: int
    bytes: int


@dataclass(frozen=True)
class Figures:
    """Launches and bytes by formula, of the most frequent kind of layer."""

    layers: int
    by_tokens: dict[int, dict[str, Cost]]  # by path
    q_prepared_bytes: int
    table_halves_bytes: int


@dataclass(frozen=True)
class KnownIssue:
    """A known fault of what runs beside the plugin, for this shape and these versions."""

    id: str
    effect: str
    state: str
    remedy: str
    link: str


@dataclass(frozen=True)
class Plan:
    """What would engage."""

    plugin: str
    vllm: str
    model: Model
    arch: str
    options: Options
    environment: dict[str, tuple[str, str]]  # value and origin by name
    heads_per_rank: int
    absorb_weight: str | None
    absorb_weights: dict[str, int]
    limit: int
    integration: str
    why_not_passes: Skip | None
    compile_ranges: Ranges
    captures: Captures
    outcome: str
    layers: Layers
    reasons: tuple[Skip, ...]
    kernels: tuple[PlannedSpan, ...] | None
    figures: Figures | None
    assumptions: tuple[str, ...]
    known_issues: tuple[KnownIssue, ...] = ()  # none without a known shape
    warnings: tuple[str, ...] = ()  # what was probably typed by mistake
    evidence: files.Stamp = files.stamp_field("plan")

    @property
    def has_fp8_cache(self) -> bool:
        """Whether the KV cache that was planned is in fp8."""
        return is_fp8_cache(self.options.kv_cache_dtype)
