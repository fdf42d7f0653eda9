# SPDX-License-Identifier: Apache-2.0
"""Every reason to skip an engine or a layer, as tables of rules; and the decode limit's arithmetic.

A rule is a code, a condition over a plain view, and a sentence. ``compat`` fills the views from vLLM's objects. This
module imports neither torch nor vLLM. ``passes`` and the choice of a kernel give further reasons, with codes from the
tables here. The log, ``check`` and the report print a skip unchanged.
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
"""Why ``kernel=auto`` leaves out a kernel. The text follows the kernel's name."""
ABORTED = "aborted_before"
"""Code of a kernel in whose first call, or while it was timed, an earlier start ended."""
VLLM_FASTER = "vllm_faster"
"""Code of a layer for which vLLM's own kernels were the fastest."""
INTEGRATIONS = ("passes", "module")
"""What puts the op into a layer: passes over the compiled graph, or the forward of vLLM's MLA wrapper."""
CODES_BY_LEVEL: dict[str, dict[str, tuple[str, str]]] = json.loads(
    (Path(__file__).parent / "reasons.json").read_text(encoding="utf-8")
)
"""Cause and remedy of each code that a :class:`Skip` may have, by the level that the code skips. An "engine" is skipped
before anything is compiled (some of these codes apply to one layer too), and a "layer" by its attention module. "graph"
is the graph or wrapper of a layer, before its first run, and "kernel" a kernel that could run the layer. ``make docs``
makes a page of these codes."""
REMEDIES = {code: remedy.replace("`", "") for codes in CODES_BY_LEVEL.values() for code, (_, remedy) in codes.items()}
"""What to do about each code: the status line, `status` and `check` print these texts."""
REASON_CODES = frozenset(REMEDIES)
"""Every code that a :class:`Skip` of this version may have."""
UNSUPPORTED_CODES = frozenset(code for code, remedy in REMEDIES.items() if remedy.startswith("none: "))
"""Codes that no setting changes: the plugin does not support the model, so advice for the fast path would be wrong."""

KV_CACHE_DTYPES = frozenset({"auto", "bfloat16", "float16", "fp8", "fp8_e4m3"})
"""vLLM's names of cache dtypes that the kernels write: the activations' dtype, or fp8 e4m3 with a scale per tensor."""
DECODE_CAPTURES = frozenset({"NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH"})
"""Names of vLLM's ``AttentionCGSupport`` whose full graphs hold decode rows only."""
CARDS = frozenset({"gfx942", "gfx950"})
"""Architectures that AITER's op supports."""
PORTABLE_KERNELS = frozenset({"triton", "reference"})
"""Kernels that also run on other platforms if the user names one of them: for tests and other GPUs."""
AITER_MLA = "ROCM_AITER_MLA"
"""vLLM's name of the attention back end that the fast path calls."""
PARTITION_OPTION = "-cc.use_inductor_graph_partition=true"
"""The option, as a user types it, with which vLLM compiles a graph that holds whole layers."""
MIN_DECODE_LIMIT_TOKENS = 2
"""vLLM drops compile-range endpoints below 2, so a limit of 1 would never end a range and the passes would never run.
A server with ``max_num_seqs=1`` gets a decode limit of two tokens."""


@dataclass(frozen=True)
class Skip:
    """Why an engine or a layer runs vLLM's own code."""

    code: str  # stable name, one of :data:`REASON_CODES`; a file of another version may have another code
    message: str  # one line that states the cause; REMEDIES says what to do

    def __str__(self) -> str:
        return f"{self.reason} -> {self.remedy}"

    @property
    def reason(self) -> str:
        """Code and message, without the remedy."""
        return f"{self.code}: {self.message}"

    @property
    def remedy(self) -> str:
        """The remedy of the code; "" for a code of another version."""
        return REMEDIES.get(self.code, "")

    @property
    def level(self) -> str:
        """What the code skips: "engine", "layer", "graph" or "kernel"; "" for a code of another version."""
        return next((level for level, codes in CODES_BY_LEVEL.items() if self.code in codes), "")


@dataclass(frozen=True)
class _View:
    """The facts that the rules read of both engines and layers."""

    # Names of vLLM, or of the layer, that the supported versions have and this one lacks
    missing_names: tuple[str, ...] = ()
    is_sparse: bool = False
    dcp: int = 1
    pcp: int = 1
    has_hisparse: bool = False
    kv_cache_dtype: str = "auto"  # as vLLM spells it
    model_dtype: str = ""  # activation dtype without the ``torch.`` prefix; empty if unknown


@dataclass(frozen=True)
class ConfigView(_View):
    """The facts of a finished ``VllmConfig`` that the gate decides on. The defaults describe an admitted engine."""

    vllm_version: str = ""  # as vLLM prints it
    is_supported_version: bool = True  # whether that release is supported
    failed_steps: tuple[str, ...] = ()  # steps of the plugin's registration that failed, each with its error
    op_differences: tuple[str, ...] = ()  # how vLLM's MLA ops differ from what the plugin knows, one sentence each
    fused_op_differences: tuple[str, ...] = ()  # the same for vLLM's fused RoPE + KV write, which only pass 1 calls
    unknown_forward: str = ""  # why the module integration may not replace vLLM's forwards
    user_pass: str = ""  # why the user's custom pass cannot run before ours
    is_atom_active: bool = False
    is_mla: bool = True
    is_mla_disabled: bool = False  # whether vLLM's variable disables MLA; then it is unknown whether the model has MLA
    model_impl: str = ""  # the option of that name if vLLM runs Transformers' code of the model, else empty
    enforce_eager: bool = False
    breakable_cudagraph: bool = False
    mode: str = "VLLM_COMPILE"  # name of the compilation mode
    backend: str = "inductor"
    use_inductor_graph_partition: bool = False
    splitting_ops: tuple[str, ...] = ()  # where vLLM will cut the graph
    endpoints: tuple[int, ...] = ()  # ends of vLLM's compile ranges in tokens
    cache_dir: str = ""  # the user's folder of compiled graphs; in its own vLLM keeps them by config and by our key
    max_num_seqs: int = 1
    num_drafts: int = 0  # draft tokens of a request in one step
    max_num_batched_tokens: int | None = None
    card: str = "gfx942"  # architecture of an AMD card, else the name of vLLM's platform
    uses_aiter: bool = True  # whether vLLM takes AITER's MLA if the user names no attention back end
    attention: str = AITER_MLA  # the back end that vLLM takes, or why this is not known; read on ROCm only
    has_vllm_fusion: bool = False  # whether vLLM's own fusion of RoPE and the KV write for MLA is on
    layers: Sequence[int] = ()  # indices of the model's MLA layers
    # As vLLM's metrics label the engine; None if this cannot be read
    model_name: str | None = None
    engine: str | None = None


@dataclass(frozen=True)
class Engagement:
    """How the gate engages an admitted engine: what it writes into the config."""

    limit: int  # the decode limit in tokens
    integration: str  # one of ``INTEGRATIONS``
    splitting_ops: tuple[str, ...]  # the ops of vLLM, and ours if vLLM cuts the graph at attention
    endpoints: tuple[int, ...]  # ends of the compile ranges; the passes add the decode limit


@dataclass(frozen=True)
class LayerView(_View):
    """The facts of one attention layer that the rules read. The defaults describe an admitted layer."""

    impl: str = "AiterMLAImpl"  # class name of ``layer.impl``
    # Class names of the implementations that the fast path calls correctly
    known_impls: frozenset[str] = frozenset({"AiterMLAImpl"})
    forward_origin: str = ""  # where an unknown ``forward_impl`` comes from; empty if it is vLLM's own
    q_pad_num_heads: int | None = None  # number of heads to which the implementation pads the query, if it does
    has_absorbed_weight: bool = True
    has_amx_bmm: bool = False
    has_rope_kernel: bool = True
    # Dimensions of the bound KV cache; ``None`` while none is bound (compilation runs before)
    kv_cache_ndim: int | None = None
    # Which batches vLLM may capture in full graphs of this attention, a name of its ``AttentionCGSupport``
    cudagraph_support: str = "UNIFORM_BATCH"
    dcp_q_replicate: bool = False  # whether the query is replicated for decode context parallelism
    graph_dtype: str = ""  # dtype in which the graph computes if it differs from the layer's, else empty
    cos_sin_dtype_matches: bool = True
    has_sliding_window: bool = False
    is_query_scaled: bool = False  # whether the model scales each row of the rotated query (``llama_4_scaling``)
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

    code: str  # one of :data:`REASON_CODES`
    condition: Callable[[Any], object]  # takes a view; if true, this reason applies. A tuple holds details as text
    sentence: str  # a format string; ``v`` is the view, ``details`` the joined texts of the tuple


SHARED_RULES = (
    Rule("sparse_mla", lambda v: v.is_sparse, "sparse MLA: an indexer picks the KV rows (index_topk in the config)"),
    Rule("dcp", lambda v: v.dcp > 1, "decode_context_parallel_size is {v.dcp}"),
    Rule("pcp", lambda v: v.pcp > 1, "prefill_context_parallel_size is {v.pcp}"),
    Rule(
        "hisparse", lambda v: v.has_hisparse, "HiSparse manages the KV rows (attention_config.hisparse_config is set)"
    ),
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
"""Rules on facts that both an engine's config and each of its layers have."""

ENGINE_RULES = (
    Rule(
        "vllm_version",
        lambda v: not v.is_supported_version,
        "vLLM {v.vllm_version} is outside the supported window",
    ),
    Rule("capability", lambda v: v.missing_names, "this vLLM ({v.vllm_version}) lacks {details}"),
    Rule("capability", lambda v: v.failed_steps, "the plugin could not do what it needs: {details}"),
    Rule("op_schema", lambda v: v.op_differences, "in this vLLM ({v.vllm_version}) {details}"),
    Rule("atom", lambda v: v.is_atom_active, "ATOM's plugin owns the model"),
    Rule("mla_disabled", lambda v: v.is_mla_disabled, "VLLM_MLA_DISABLE is set"),
    Rule("not_mla", lambda v: not v.is_mla and not v.is_mla_disabled, "the model has no MLA that vLLM knows"),
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
    Rule(
        "cache_dir",
        lambda v: v.cache_dir and v.mode == "VLLM_COMPILE",
        "compilation_config.cache_dir is {v.cache_dir!r}: vLLM takes any graph it finds there, whatever was decided",
    ),
    *SHARED_RULES,
)
"""Rules that hold for both integrations."""

USER_RULES = (Rule("user_pass", lambda v: v.user_pass, "{v.user_pass}"),)
"""Rules on what the user has put into the slot that our pass takes."""

PLATFORM_RULES = (
    Rule(
        "platform",
        lambda v: v.card not in CARDS,
        f"the platform is {{v.card}}, the fast path is for ROCm on {' and '.join(sorted(CARDS))}",
    ),
    Rule(
        "aiter_off",
        lambda v: v.attention != AITER_MLA and not v.uses_aiter and (v.attention.partition(" (")[0],),
        "vLLM does not use AITER for MLA (its attention is {details})",
    ),
    Rule(
        "attention_backend",
        lambda v: v.attention != AITER_MLA and v.uses_aiter,
        "vLLM's attention is {v.attention}",
    ),
)
"""Rules on whether layers get the attention implementation that the fast path calls.

A kernel of ``PORTABLE_KERNELS`` does not need that implementation. After loading, ``LAYER_RULES`` check each layer's
implementation again."""

PASSES_RULES = (
    Rule("op_schema", lambda v: v.fused_op_differences, "in this vLLM ({v.vllm_version}) {details}"),
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
        lambda v: not v.use_inductor_graph_partition and _split_ops(v.splitting_ops),
        "vLLM cuts the graph at {details}",
    ),
)
"""Rules of the passes, which need a compiled graph that holds attention, the KV update and the query projection."""

MODULE_RULES = (Rule("unknown_forward", lambda v: v.unknown_forward, "{v.unknown_forward}"),)
"""Rules of the module, which replaces two forwards of vLLM and must know them. Wrappers are checked after loading."""

LAYER_RULES = (
    Rule("capability", lambda v: v.missing_names, "the attention layer of this vLLM lacks {details}"),
    *SHARED_RULES,
    Rule("dcp", lambda v: v.dcp_q_replicate and v.dcp <= 1, "the query is replicated for decode context parallelism"),
    Rule("impl", lambda v: v.impl not in v.known_impls, "the attention implementation {v.impl} is not a known one"),
    Rule(
        "unknown_forward",
        lambda v: v.forward_origin,
        "forward_impl comes from {v.forward_origin}, not from vLLM's layer",
    ),
    Rule("q_padding", lambda v: v.q_pad_num_heads, "the query is padded to {v.q_pad_num_heads} heads"),
    Rule("sliding_window", lambda v: v.has_sliding_window, "the layer has a sliding window"),
    # Our kernels would scale before the rotation, and so round other values than vLLM.
    Rule(
        "query_scaled",
        lambda v: v.is_query_scaled,
        "the model scales its rotated query (llama_4_scaling in its config)",
    ),
    Rule("no_rope_kernel", lambda v: not v.has_rope_kernel, "vLLM has no concat_and_cache_mla_rope_fused here"),
    Rule("amx_bmm", lambda v: v.has_amx_bmm, "the CPU backend packed the absorb weights for AMX"),
    Rule("no_absorbed_weight", lambda v: not v.has_absorbed_weight, "the layer has no W_UK_T, or no W_K and W_K_scale"),
    Rule(
        "kv_cache_ndim", lambda v: v.kv_cache_ndim not in (None, 3), "the cache has {v.kv_cache_ndim} dimensions, not 3"
    ),
    Rule(
        # The op chooses its branch when a graph is captured, and a replay cannot change that.
        "captured_prefill",
        lambda v: v.cudagraph_support not in DECODE_CAPTURES,
        "vLLM may capture this attention's prefill rows in full graphs (cudagraph support {v.cudagraph_support})",
    ),
    Rule(
        # The self-check ran in the layer's own dtype and proves nothing about another dtype.
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


def decide_engine(facts: ConfigView, settings: Settings) -> Skip | Engagement:
    """Return how to engage an engine whose flag is on, or why it must be skipped. Pure."""
    skip = next(iter(config_skips(facts, settings)), None)
    if skip is not None:
        return skip
    limit, integration = decode_limit_of(facts, settings), integration_of(facts, settings)
    max_tokens = facts.max_num_batched_tokens  # vLLM drops an end that no batch exceeds
    is_new_endpoint = integration == "passes" and (max_tokens is None or limit < max_tokens)
    endpoints = tuple(sorted({*facts.endpoints, limit})) if is_new_endpoint else facts.endpoints
    replaced_ops = (MLA_ATTENTION_OP,) if integration == "passes" else (MLA_ATTENTION_OP, KV_UPDATE_OP)
    is_split = facts.mode == "VLLM_COMPILE" and any(plain_name(op) in replaced_ops for op in facts.splitting_ops)
    new_splitting_ops = [op for op in ATTENTION_OPS if is_split and op not in facts.splitting_ops]
    return Engagement(limit, integration, (*facts.splitting_ops, *new_splitting_ops), endpoints)


def config_skips(facts: ConfigView, settings: Settings) -> list[Skip]:
    """Return every reason for which no layer of this engine may take the fast path, in the order of the rules."""
    is_version_check_off = settings.debug.untested_vllm
    engine_rules = tuple(rule for rule in ENGINE_RULES if not (is_version_check_off and rule.code == "vllm_version"))
    platform_rules = PLATFORM_RULES * (settings.kernel not in PORTABLE_KERNELS)
    integration_rules = PASSES_RULES if integration_of(facts, settings) == "passes" else MODULE_RULES
    return _matching_skips((*engine_rules, *platform_rules, *integration_rules, *USER_RULES), facts)


def layer_skips(view: LayerView) -> list[Skip]:
    """Return every reason for which this layer is skipped, in the order of the rules; no other layer matters."""
    return _matching_skips(LAYER_RULES, view)


def platform_skip(facts: ConfigView) -> Skip | None:
    """Return why the platform does not have the fast path, whatever the kernel; None if it has."""
    return next(iter(_matching_skips(PLATFORM_RULES, facts)), None)


def passes_skip(facts: ConfigView) -> Skip | None:
    """Return why the passes cannot run in this engine, or None."""
    return next(iter(_matching_skips(PASSES_RULES, facts)), None)


def integration_of(facts: ConfigView, settings: Settings) -> str:
    """Return the integration of an engine; ``auto`` means the passes if the user's options let them run."""
    if settings.integration != "auto":
        return settings.integration
    return "passes" if passes_skip(facts) is None else "module"


def plain_name(op: str) -> str:
    """Return an entry of ``splitting_ops`` without its overload; vLLM accepts both spellings."""
    return op.removesuffix(".default")


def decode_limit(max_num_seqs: int, num_speculative_tokens: int, override: int | None = None) -> int:
    """Return the decode limit, the largest number of tokens that a decode step can hold.

    ``max_num_seqs * (1 + num_speculative_tokens)`` is vLLM's own bound for decode-mode captures: each request
    brings its newly sampled token and its drafts. ``override`` replaces this bound. The limit affects speed and memory.
    A short prompt runs the same compiled range as a decode step, so correctness must not depend on the limit.
    """
    return max(override or max_num_seqs * (1 + num_speculative_tokens), MIN_DECODE_LIMIT_TOKENS)


def decode_limit_of(facts: ConfigView, settings: Settings) -> int:
    """Return the decode limit of an engine in tokens."""
    return decode_limit(facts.max_num_seqs, facts.num_drafts, settings.max_token_num)


def is_within_limit(range_end: int, limit: int) -> bool:
    """Return whether a compile range that ends at ``range_end`` tokens lies within the decode limit."""
    return range_end <= limit


def _matching_skips(rules: tuple[Rule, ...], view: _View) -> list[Skip]:
    """Return a skip for each rule that applies to a view."""
    skips = []
    for rule in rules:
        result = rule.condition(view)
        if result:
            details = "; ".join(result) if isinstance(result, tuple) else ""
            skips.append(Skip(rule.code, rule.sentence.format(v=view, details=details)))
    return skips


def _split_ops(splitting_ops: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(op for op in (MLA_ATTENTION_OP, KV_UPDATE_OP) if op in map(plain_name, splitting_ops))
