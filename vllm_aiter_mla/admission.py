# SPDX-License-Identifier: Apache-2.0
"""Every reason to skip an engine or a layer, as tables of rules; and the decode limit's arithmetic.

A rule is a code, a condition over a plain view, and a sentence. ``compat`` fills the views from vLLM's objects. This
module imports neither torch nor vLLM. ``passes`` and the choice of a kernel give further reasons, with codes from the
tables here. A skip is a value: the log, ``check`` and the report print it as it is.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_aiter_mla.settings import Settings

MLA_ATTENTION_OP = "vllm::unified_mla_attention_with_output"
KV_UPDATE_OP = "vllm::unified_mla_kv_cache_update"
ATTENTION_OPS = ("vllm_aiter_mla::mla_attention_with_prepared_q", "vllm_aiter_mla::mla_attention_with_rope")
"""The plugin's attention ops, after pass 2 and after pass 3, in the spelling of ``splitting_ops``."""
OVERFLOW = "turns a rotated value beyond fp8's range into NaN, where vLLM's own kernels store the largest value"
"""What a kernel does that ``kernel=auto`` leaves out, after the kernel's name."""
ABORTED = "aborted_before"
"""Code of a kernel in whose first call an earlier start ended."""
VLLM_FASTER = "vllm_faster"
"""Code of a layer for which vLLM's own kernels were the fastest."""
INTEGRATIONS = ("passes", "module")
"""What puts the op into a layer: passes over the compiled graph, or the forward of vLLM's MLA wrapper."""
LEVELS: dict[str, dict[str, tuple[str, str]]] = json.loads(
    (Path(__file__).parent / "reasons.json").read_text(encoding="utf-8")
)
"""Cause and remedy of each code that a :class:`Skip` may carry, by what it is a reason of: the whole "engine", before
anything is compiled (some apply to one layer too); a "layer", from its attention module; its "graph", or its wrapper,
before it first runs; or the "kernel" that could run it. ``make docs`` makes a page of them."""
REMEDIES = {code: remedy.replace("`", "") for codes in LEVELS.values() for code, (_, remedy) in codes.items()}
"""What to do about each code: the status line, `status` and `check` all say this."""
REASONS = frozenset(REMEDIES)
UNSUPPORTED = frozenset(code for code, remedy in REMEDIES.items() if remedy.startswith("none: "))
"""Codes of what no setting changes: the model is not taken, and advice for the fast path would be wrong."""

KV_CACHE_DTYPES = frozenset({"auto", "bfloat16", "float16", "fp8", "fp8_e4m3"})
"""vLLM's names of the caches that the kernels write: the activation dtype, or fp8 e4m3 with one scale per tensor."""
DECODE_CAPTURES = frozenset({"NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH"})
"""Names of vLLM's ``AttentionCGSupport`` whose full graphs hold decode rows only."""
CARDS = frozenset({"gfx942", "gfx950"})
"""Architectures that AITER's op is for."""
ANY_CARD = frozenset({"triton", "reference"})
"""Kernels that run on other platforms too, if the user names one: for tests and other GPUs."""
AITER_MLA = "ROCM_AITER_MLA"
"""vLLM's name of the attention back end that the fast path calls."""
PARTITION = "-cc.use_inductor_graph_partition=true"
"""The option with which vLLM compiles a graph that holds whole layers, as it is typed."""
SMALLEST_LIMIT = 2
"""vLLM drops compile-range endpoints below 2, so a limit of 1 would never end a range and the passes would never run.
A server with ``max_num_seqs=1`` gets a decode limit of two tokens."""


@dataclass(frozen=True)
class Skip:
    """Why an engine or a layer runs vLLM's own code."""

    code: str  # stable name, one of :data:`REASONS`; in a file of another version perhaps none of them
    message: str  # one line that says what was found; what to do about it is in REMEDIES

    def __str__(self) -> str:
        return f"{self.reason} -> {self.remedy}"

    @property
    def reason(self) -> str:
        """Code and message, without the remedy."""
        return f"{self.code}: {self.message}"

    @property
    def remedy(self) -> str:
        """What to do about the code; "" for a code of another version."""
        return REMEDIES.get(self.code, "")

    @property
    def level(self) -> str:
        """What the code is a reason of: "engine", "layer", "graph" or "kernel"; "" for a code of another version."""
        return next((level for level, codes in LEVELS.items() if self.code in codes), "")


@dataclass(frozen=True)
class _View:
    """What the rules read of engines and of layers."""

    missing: tuple[str, ...] = ()  # capabilities, or attributes of the layer, that a known vLLM has and this one lacks
    is_sparse: bool = False
    dcp: int = 1
    pcp: int = 1
    hisparse: bool = False
    kv_cache_dtype: str = "auto"  # as vLLM spells it
    model_dtype: str = ""  # activation dtype without the ``torch.`` prefix; empty when unknown


@dataclass(frozen=True)
class ConfigView(_View):
    """What the gate decides by, of a finished ``VllmConfig``. The defaults describe an engine that is admitted."""

    vllm_version: str = ""  # as vLLM prints it
    in_window: bool = True  # whether that release is a supported one
    failed_steps: tuple[str, ...] = ()  # steps of the plugin's registration that failed, each with its error
    op_schema: tuple[str, ...] = ()  # how vLLM's MLA ops differ from what the plugin knows, one sentence each
    fused_op: tuple[str, ...] = ()  # likewise vLLM's fused RoPE + KV write, which only pass 1 calls
    unknown_forward: str = ""  # why the module integration may not replace vLLM's forwards
    user_pass: str = ""  # why the user's custom pass cannot run before ours
    atom_active: bool = False
    is_mla: bool = True
    mla_disabled: bool = False  # by vLLM's variable, so that nobody knows whether the model has MLA
    model_impl: str = ""  # the option, where vLLM runs the model's code of Transformers
    enforce_eager: bool = False
    breakable_cudagraph: bool = False
    mode: str = "VLLM_COMPILE"  # name of the compilation mode
    backend: str = "inductor"
    use_inductor_graph_partition: bool = False
    splitting_ops: tuple[str, ...] = ()  # where vLLM will cut the graph
    endpoints: tuple[int, ...] = ()  # ends of vLLM's compile ranges in tokens
    max_num_seqs: int = 1
    num_drafts: int = 0  # draft tokens of a request in one step
    max_num_batched_tokens: int | None = None
    card: str = "gfx942"  # architecture of an AMD card, else the name of vLLM's platform
    uses_aiter: bool = True  # vLLM takes AITER's MLA where the user names no attention back end
    attention: str = AITER_MLA  # the back end that vLLM takes, or why it cannot be told; asked on ROCm only
    fusion: bool = False  # vLLM's own fusion of RoPE and the KV write for MLA is on
    layers: Sequence[int] = ()  # indices of the model's MLA layers
    # As vLLM's metrics label the engine; None for what cannot be read
    model_name: str | None = None
    engine: str | None = None


@dataclass(frozen=True)
class Engage:
    """What the gate makes of an admitted config."""

    limit: int  # the decode limit in tokens
    integration: str  # one of ``INTEGRATIONS``
    splitting_ops: tuple[str, ...]  # those of vLLM, and ours where vLLM cuts the graph at attention
    endpoints: tuple[int, ...]  # ends of the compile ranges; the passes add the decode limit


@dataclass(frozen=True)
class LayerView(_View):
    """What the rules read of one attention layer. The defaults describe a layer that is admitted."""

    impl: str = "AiterMLAImpl"  # class name of ``layer.impl``
    # Class names of the implementations that the fast path calls correctly
    known_impls: frozenset[str] = frozenset({"AiterMLAImpl"})
    own_forward: str = ""  # where an unknown ``forward_impl`` comes from; empty if it is vLLM's own
    q_pad_num_heads: int | None = None  # heads that the implementation pads the query to, ``None`` without padding
    has_absorbed_weight: bool = True
    amx_bmm: bool = False
    has_rope_kernel: bool = True
    # Dimensions of the bound KV cache; ``None`` while none is bound (compilation runs before)
    kv_cache_ndim: int | None = None
    # What vLLM may capture in full graphs of this attention, a name of its ``AttentionCGSupport``
    captures: str = "UNIFORM_BATCH"
    dcp_q_replicate: bool = False  # the query is replicated for decode context parallelism
    graph_dtype: str = ""  # dtype that the graph computes in if it is not the layer's, else empty
    cos_sin_dtype_matches: bool = True
    sliding_window: bool = False
    query_scaled: bool = False  # the model scales the rotated query by a factor per row (``llama_4_scaling``)
    num_heads: int = 16  # N (per rank), P, R, L and V
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    kv_lora_rank: int = 512
    v_head_dim: int = 128

    @property
    def sizes(self) -> tuple[int, ...]:
        """N, P, R, L and V."""
        return (self.num_heads, self.qk_nope_head_dim, self.qk_rope_head_dim, self.kv_lora_rank, self.v_head_dim)


class Rule(NamedTuple):
    """One reason to skip."""

    code: str  # one of :data:`REASONS`
    applies: Callable[[Any], object]  # takes a view; true, or a tuple of what was found, if there is this reason
    sentence: str  # a format string; ``v`` is the view, ``found`` what was found, joined


SHARED_RULES = (
    Rule("sparse_mla", lambda v: v.is_sparse, "sparse MLA: an indexer picks the KV rows (index_topk in the config)"),
    Rule("dcp", lambda v: v.dcp > 1, "decode_context_parallel_size is {v.dcp}"),
    Rule("pcp", lambda v: v.pcp > 1, "prefill_context_parallel_size is {v.pcp}"),
    Rule("hisparse", lambda v: v.hisparse, "HiSparse manages the KV rows (attention_config.hisparse_config is set)"),
    Rule(
        "kv_cache_dtype",
        lambda v: v.kv_cache_dtype not in KV_CACHE_DTYPES,
        f"kv_cache_dtype is {{v.kv_cache_dtype!r}}; the kernels write {', '.join(sorted(KV_CACHE_DTYPES))}",
    ),
    Rule(
        "kv_cache_dtype",
        lambda v: v.kv_cache_dtype in ("bfloat16", "float16") and v.model_dtype not in ("", v.kv_cache_dtype),
        "kv_cache_dtype is {v.kv_cache_dtype!r} but the model computes in {v.model_dtype}",
    ),
)
"""Facts that an engine's config and each of its layers state."""

ENGINE_RULES = (
    Rule(
        "vllm_version",
        lambda v: not v.in_window,
        "vLLM {v.vllm_version} is outside the supported window",
    ),
    Rule("capability", lambda v: v.missing, "this vLLM ({v.vllm_version}) lacks {found}"),
    Rule("capability", lambda v: v.failed_steps, "the plugin could not do what it needs: {found}"),
    Rule("op_schema", lambda v: v.op_schema, "in this vLLM ({v.vllm_version}) {found}"),
    Rule("atom", lambda v: v.atom_active, "ATOM's plugin owns the model"),
    Rule("mla_disabled", lambda v: v.mla_disabled, "VLLM_MLA_DISABLE is set"),
    Rule("not_mla", lambda v: not v.is_mla and not v.mla_disabled, "the model has no MLA that vLLM knows"),
    Rule(
        "transformers_backend",
        lambda v: v.model_impl == "transformers",
        "--model-impl transformers: RoPE is not vLLM's op",
    ),
    Rule(
        "no_vllm_class",
        lambda v: v.model_impl not in ("", "transformers"),
        "vLLM has no class of its own for the model and runs Transformers' code, whose RoPE is not vLLM's op",
    ),
    *SHARED_RULES,
)
"""Whatever puts the op into the layers."""

USER_RULES = (Rule("user_pass", lambda v: v.user_pass, "{v.user_pass}"),)
"""What the user has put into the slot that our pass takes."""

PLATFORM_RULES = (
    Rule(
        "platform",
        lambda v: v.card not in CARDS,
        f"the platform is {{v.card}}, the fast path is for ROCm on {' and '.join(sorted(CARDS))}",
    ),
    Rule(
        "aiter_off",
        lambda v: v.attention != AITER_MLA and not v.uses_aiter and (v.attention.partition(" (")[0],),
        "vLLM does not use AITER for MLA (its attention is {found})",
    ),
    Rule(
        "attention_backend",
        lambda v: v.attention != AITER_MLA and v.uses_aiter,
        "vLLM's attention is {v.attention}",
    ),
)
"""What decides whether layers get the implementation that the fast path calls; a kernel of ``ANY_CARD`` may do without.

A layer's own implementation is looked at again after loading."""

PASSES_RULES = (
    Rule("op_schema", lambda v: v.fused_op, "in this vLLM ({v.vllm_version}) {found}"),
    Rule("enforce_eager", lambda v: v.enforce_eager, "enforce_eager=True leaves no graph"),
    Rule(
        "breakable_cudagraph",
        lambda v: v.mode != "VLLM_COMPILE" and v.breakable_cudagraph,
        "VLLM_USE_BREAKABLE_CUDAGRAPH runs the model uncompiled",
    ),
    Rule(
        "compilation_mode",
        lambda v: v.mode != "VLLM_COMPILE" and not v.breakable_cudagraph,
        "compilation_config.mode is {v.mode}; the passes need VLLM_COMPILE",
    ),
    Rule("backend", lambda v: v.backend != "inductor", "compilation_config.backend is {v.backend!r}, not 'inductor'"),
    Rule(
        "graph_partition",
        lambda v: not v.use_inductor_graph_partition and _cuts(v.splitting_ops),
        "vLLM cuts the graph at {found}",
    ),
)
"""The passes need a compiled graph in which attention, the KV update and the query projection lie together."""

MODULE_RULES = (Rule("unknown_forward", lambda v: v.unknown_forward, "{v.unknown_forward}"),)
"""The module replaces two forwards of vLLM, so it must know them. Each layer's wrapper is looked at after loading."""

LAYER_RULES = (
    Rule("capability", lambda v: v.missing, "the attention layer of this vLLM lacks {found}"),
    *SHARED_RULES,
    Rule("dcp", lambda v: v.dcp_q_replicate and v.dcp <= 1, "the query is replicated for decode context parallelism"),
    Rule("impl", lambda v: v.impl not in v.known_impls, "the attention implementation {v.impl} is not a known one"),
    Rule("unknown_forward", lambda v: v.own_forward, "forward_impl comes from {v.own_forward}, not from vLLM's layer"),
    Rule("q_padding", lambda v: v.q_pad_num_heads, "the query is padded to {v.q_pad_num_heads} heads"),
    Rule("sliding_window", lambda v: v.sliding_window, "the layer has a sliding window"),
    # A kernel of ours would scale before it rotates, which rounds elsewhere.
    Rule(
        "query_scaled", lambda v: v.query_scaled, "the model scales its rotated query (llama_4_scaling in its config)"
    ),
    Rule("no_rope_kernel", lambda v: not v.has_rope_kernel, "vLLM has no concat_and_cache_mla_rope_fused here"),
    Rule("amx_bmm", lambda v: v.amx_bmm, "the CPU backend packed the absorb weights for AMX"),
    Rule("no_absorbed_weight", lambda v: not v.has_absorbed_weight, "the layer has no W_UK_T, or no W_K and W_K_scale"),
    Rule(
        "kv_cache_ndim", lambda v: v.kv_cache_ndim not in (None, 3), "the cache has {v.kv_cache_ndim} dimensions, not 3"
    ),
    Rule(
        # The op takes its branch when a graph is captured, and a replay cannot change it.
        "captured_prefill",
        lambda v: v.captures not in DECODE_CAPTURES,
        "vLLM may capture this attention's prefill rows in full graphs (cudagraph support {v.captures})",
    ),
    Rule(
        # The self-check ran in the layer's own dtype and proves nothing about another one.
        "activation_dtype",
        lambda v: v.graph_dtype,
        "the graph computes in {v.graph_dtype}, the layer's weights are for {v.model_dtype}",
    ),
    Rule("cos_sin_dtype", lambda v: not v.cos_sin_dtype_matches, "the cos/sin table's dtype is not the activations'"),
    Rule(
        "geometry",
        lambda v: min(v.sizes) <= 0 or v.qk_rope_head_dim % 2,
        "N, P, R, L, V = {v.sizes}: all must be positive and R even",
    ),
)


def decide_engine(facts: ConfigView, settings: Settings) -> Skip | Engage:
    """Return what the gate makes of an engine whose flag is on, or why the engine runs vLLM's own code. Pure."""
    skip = next(iter(config_skips(facts, settings)), None)
    if skip is not None:
        return skip
    limit, integration = decode_limit_of(facts, settings), integration_of(facts, settings)
    added = integration == "passes" and _ends_a_range(limit, facts.max_num_batched_tokens)
    cut = (MLA_ATTENTION_OP,) if integration == "passes" else (MLA_ATTENTION_OP, KV_UPDATE_OP)
    cuts = facts.mode == "VLLM_COMPILE" and any(plain_name(op) in cut for op in facts.splitting_ops)
    ours = [op for op in ATTENTION_OPS if cuts and op not in facts.splitting_ops]
    endpoints = tuple(sorted({*facts.endpoints, limit})) if added else facts.endpoints
    return Engage(limit, integration, (*facts.splitting_ops, *ours), endpoints)


def config_skips(facts: ConfigView, settings: Settings) -> list[Skip]:
    """Return every reason for which no layer of this engine may take the fast path, in the order of the rules."""
    untested = settings.debug.untested_vllm
    engine = tuple(rule for rule in ENGINE_RULES if not (untested and rule.code == "vllm_version"))
    platform = PLATFORM_RULES * (settings.kernel not in ANY_CARD)
    by = PASSES_RULES if integration_of(facts, settings) == "passes" else MODULE_RULES
    return _all((*engine, *platform, *by, *USER_RULES), facts)


def layer_skips(view: LayerView) -> list[Skip]:
    """Return every reason for which this layer is left to vLLM, in the order of the rules; no other layer matters."""
    return _all(LAYER_RULES, view)


def why_not_platform(facts: ConfigView) -> Skip | None:
    """Return why the platform is not one for the fast path, whatever the kernel; ``None`` if it is one."""
    return next(iter(_all(PLATFORM_RULES, facts)), None)


def why_not_passes(facts: ConfigView) -> Skip | None:
    """Return why the passes cannot run in this engine, or ``None``."""
    return next(iter(_all(PASSES_RULES, facts)), None)


def integration_of(facts: ConfigView, settings: Settings) -> str:
    """Return what puts the op into an engine's layers; ``auto`` is the passes where the user's options let them run."""
    if settings.integration != "auto":
        return settings.integration
    return "passes" if why_not_passes(facts) is None else "module"


def plain_name(op: str) -> str:
    """Return an entry of ``splitting_ops`` without its overload; vLLM accepts both spellings."""
    return op.removesuffix(".default")


def decode_limit(max_num_seqs: int, num_speculative_tokens: int, override: int | None = None) -> int:
    """Return the decode limit, the largest number of tokens that a decode step can hold.

    ``max_num_seqs * (1 + num_speculative_tokens)`` is vLLM's own bound for decode-mode captures: each request
    brings its newly sampled token and its drafts. ``override`` replaces it. The limit is about speed and memory:
    a short prompt runs the same compiled range as a decode step, so correctness must not depend on the limit.
    """
    return max(override or max_num_seqs * (1 + num_speculative_tokens), SMALLEST_LIMIT)


def decode_limit_of(facts: ConfigView, settings: Settings) -> int:
    """Return the decode limit of an engine in tokens."""
    return decode_limit(facts.max_num_seqs, facts.num_drafts, settings.max_token_num)


def _ends_a_range(limit: int, max_num_batched_tokens: int | None) -> bool:
    """Return whether vLLM lets a compile range end at ``limit``: it drops 1, and what no batch exceeds."""
    return limit > 1 and (max_num_batched_tokens is None or limit < max_num_batched_tokens)


def within_limit(range_end: int, limit: int) -> bool:
    """Return whether a compile range that ends at ``range_end`` tokens lies within the decode limit."""
    return range_end <= limit


def _all(rules: tuple[Rule, ...], view: _View) -> list[Skip]:
    skips = []
    for rule in rules:
        found = rule.applies(view)
        if found:
            joined = "; ".join(found) if isinstance(found, tuple) else ""
            skips.append(Skip(rule.code, rule.sentence.format(v=view, found=joined)))
    return skips


def _cuts(splitting_ops: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(op for op in (MLA_ATTENTION_OP, KV_UPDATE_OP) if op in map(plain_name, splitting_ops))
