"""Every reason there is not to take the fast path, and who may take it: a plain view in, a skip or nothing out.

Pure: no torch, no vLLM, no GPU. ``compat`` fills the views from vLLM's objects. A skip is a value: the log,
``doctor``, ``plan`` and the report print it as it is. Engines and layers are decided here, graphs in ``passes``,
kernels where one is chosen; all of them take their codes from the tables here.
"""

from __future__ import annotations

from dataclasses import dataclass

MLA_ATTENTION_OP = "vllm::unified_mla_attention_with_output"
KV_UPDATE_OP = "vllm::unified_mla_kv_cache_update"
ATTENTION_OPS = ("vllm_aiter_mla::mla_attention_with_prepared_q", "vllm_aiter_mla::mla_attention_with_rope")
"""The plugin's attention ops, after pass 2 and after pass 3, in the spelling of ``splitting_ops``."""
INTEGRATIONS = ("passes", "module")
"""Who puts the one op into a layer: passes over the compiled graph, or the forward of vLLM's MLA wrapper."""

ENGINE_REASONS: dict[str, str] = {
    "vllm_version": "vLLM's release is outside the range this plugin was written against",
    "capability": "this vLLM, or a layer of it, lacks what the plugin reads, or one of the plugin's patches failed",
    "op_schema": "one of vLLM's MLA ops has other arguments than this plugin knows, or is missing",
    "atom": "ATOM's vLLM plugin is active and replaces the model",
    "not_mla": "the model does not use MLA attention",
    "sparse_mla": "the model uses sparse MLA (an indexer picks the KV rows)",
    "enforce_eager": "eager mode: there is no graph to rewrite",
    "breakable_cudagraph": "breakable CUDA graphs run the model without torch.compile",
    "compilation_mode": "the compilation mode is not VLLM_COMPILE, so vLLM's pass pipeline does not run",
    "backend": "the compilation back end is not Inductor, so vLLM's pass pipeline does not run",
    "dcp": "decode context parallelism splits the KV cache over ranks",
    "pcp": "prefill context parallelism splits a prompt over ranks",
    "hisparse": "HiSparse keeps KV rows in host memory",
    "kv_cache_dtype": "the KV cache's dtype or layout is not one the kernels write",
    "graph_partition": "an explicit use_inductor_graph_partition=False cuts the graph at the attention op",
    "splitting_ops": "explicit splitting_ops cut the graph at the attention op or the KV-cache update",
    "user_pass": "the custom pass already in place cannot be chained",
    "vllm_refuses": "vLLM's own checks refuse the model with these options: it does not start",
    "not_known": "vLLM could not be asked about the model or one of its layers",
}
"""Decided before anything is compiled, of the whole engine. Some are said of one layer too."""

LAYER_REASONS: dict[str, str] = {
    "impl": "the attention implementation is not one the fast path calls correctly",
    "q_padding": "the implementation pads the number of query heads",
    "no_absorbed_weight": "the layer holds no absorbed weight W_UK_T, W_K or W_K_scale where vLLM would read it",
    "amx_bmm": "the absorb matrix is packed for AMX",
    "no_rope_kernel": "this build of vLLM lacks its kernel that rotates and writes the KV rows in one launch",
    "activation_dtype": "the graph computes in another dtype than the layer whose kernel was checked",
    "cos_sin_dtype": "the cos/sin table has another dtype than the activations",
    "kv_cache_ndim": "the KV cache is not [blocks, block size, latent + rope]",
    "sliding_window": "the layer attends over a sliding window",
    "geometry": "the layer's head sizes are not those of a decoupled-RoPE MLA layer",
}
"""Decided of one layer, from the attention module."""

GRAPH_REASONS: dict[str, str] = {
    "no_rope": "no rotary embedding is applied to the query or the key in this graph",
    "no_kv_update": "no KV-cache update is tied to the attention op in this graph",
    "kv_update_shared": "something besides attention waits for the KV-cache update",
    "kv_key_mismatch": "the KV-cache update and attention read different keys",
    "kv_c_mismatch": "the KV-cache update and attention read different latents",
    "layer_name_mismatch": "the KV-cache update names another layer",
    "layer_name_unreadable": "the layer's name cannot be read from the graph",
    "layer_unknown": "the graph names a layer that this model does not have",
    "vllm_fusion_incomplete": "vLLM's own fused RoPE + KV op lacks one of its results",
    "unknown_argument": "an op is given an argument that the plugin does not know and would drop",
    "fused_output_quant": "the attention op quantises its output",
    "dcp_q_replicated": "the query is replicated for decode context parallelism",
    "attention_results": "something reads more of the attention op than its output",
    "query_shape": "the query is not [tokens, heads, width] with static sizes, or narrower than its rope part",
    "query_not_rope": "attention's query is not [q_nope, RoPE(q_pe)] of one tensor",
    "key_not_rope": "attention's k_pe is not the RoPE of one tensor with the query's pairing",
    "rope_other_operand": "a rotated value also depends on something else",
    "crossed_branches": "the rotated query and the rotated key come from the same tensor",
    "two_tables": "query and key are rotated by different tables or positions",
    "partial_rotary": "the rotary table is not as wide as the rope part",
    "positions": "positions are not one int64 per token",
    "latent_shape": "kv_c is not [tokens, kv_lora_rank] with a static width",
    "rotated_value_read_elsewhere": "something outside the layer reads a rotated value",
    "graph_input": "the un-rotated query or key is an input of the graph: it may not be rotated in place",
    "output_shared": "something else is given the attention op's output buffer",
    "query_read_elsewhere": "something outside the layer reads the query projection",
    "key_read_elsewhere": "something outside the layer reads the un-rotated k_pe",
    "graph_too_deep": "the expression above the query or the key is too large for a RoPE",
    "unknown_forward": "the layer's forward, or that of the wrapper around it, is none that this plugin knows",
    "not_evaluated": "reading the layer's graph or asking for its kernel raised an error",
    "rewrite_failed": "a pass raised an error; the layer stays as the pass before left it",
    "stop_after": "the option debug.stop_after ends the passes early",
}
"""Decided of one layer, from what its nodes or its wrapper compute, before the layer first runs."""

KERNEL_REASONS: dict[str, str] = {
    "kernel_unavailable": "no fused kernel can run in this process",
    "kernel_shape": "the kernel does not take a layer of this shape",
    "not_run": "the layer's fused op did not run during warm-up",
}
"""Decided of one layer, by the kernels that could run it."""

LEVELS = {"engine": ENGINE_REASONS, "layer": LAYER_REASONS, "graph": GRAPH_REASONS, "kernel": KERNEL_REASONS}
REASONS = {code: meaning for table in LEVELS.values() for code, meaning in table.items()}
"""Every code a :class:`Skip` may carry, with what it means in one line. docs/troubleshooting.md has the remedies."""

KV_CACHE_DTYPES = frozenset({"auto", "bfloat16", "float16", "fp8", "fp8_e4m3"})
"""vLLM's names of the caches the kernels write: the activation dtype, or fp8 e4m3 with one scale per tensor."""


@dataclass(frozen=True)
class Skip:
    """Why an engine or a layer runs vLLM's own code.

    Attributes:
        code: stable name, a key of :data:`REASONS`.
        message: one line that says what was found and names the option.
    """

    code: str
    message: str

    def __post_init__(self) -> None:
        if self.code not in REASONS:
            raise KeyError(f"skip code {self.code!r} is not in admission.REASONS")

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


@dataclass(frozen=True)
class ConfigView:
    """What admission reads of a finished ``VllmConfig``. The defaults describe an engine that is admitted.

    Attributes:
        vllm_version: as vLLM prints it.
        version_supported: inside the window, or forced by the user.
        missing: capabilities that were probed and not found, and patches that failed.
        op_schema: what vLLM's MLA ops have otherwise than the plugin knows them, one sentence each.
        mode: name of the compilation mode.
        model_dtype: activation dtype without the ``torch.`` prefix; empty when unknown.
        use_inductor_graph_partition: as the user gave it; ``None`` when left alone.
        splitting_ops: as the user gave them; ``None`` when left alone.
        integration: as the user asked for it: "auto", or one of ``INTEGRATIONS``.
    """

    vllm_version: str = ""
    version_supported: bool = True
    missing: tuple[str, ...] = ()
    failed_steps: tuple[str, ...] = ()
    op_schema: tuple[str, ...] = ()
    atom_active: bool = False
    is_mla: bool = True
    is_sparse: bool = False
    enforce_eager: bool = False
    breakable_cudagraph: bool = False
    mode: str = "VLLM_COMPILE"
    backend: str = "inductor"
    dcp: int = 1
    pcp: int = 1
    hisparse: bool = False
    kv_cache_dtype: str = "auto"
    model_dtype: str = ""
    use_inductor_graph_partition: bool | None = None
    splitting_ops: tuple[str, ...] | None = None
    integration: str = "auto"


def admit_config(view: ConfigView) -> Skip | None:
    """First reason for which no layer of this engine may take the fast path, or ``None``."""
    for check in (_environment, _model, _parallel, _cache):
        skip = check(view)
        if skip is not None:
            return skip
    return why_not_passes(view) if view.integration == "passes" else None


def why_not_passes(view: ConfigView) -> Skip | None:
    """Why the passes cannot run in this engine, or ``None``: they need a compiled graph that holds whole layers."""
    return _compilation(view) or _partition(view)


def integration_of(view: ConfigView) -> str:
    """Who emits in an admitted engine, one of ``INTEGRATIONS``: ``auto`` is the passes wherever they can run."""
    if view.integration != "auto":
        return view.integration
    return "passes" if why_not_passes(view) is None else "module"


def _environment(view: ConfigView) -> Skip | None:
    if not view.version_supported:
        return Skip(
            "vllm_version",
            f"vLLM {view.vllm_version or 'of unknown version'} is outside the supported window; "
            "additional_config.aiter_mla.debug.untested_vllm=true tries it anyway",
        )
    if view.missing:
        return Skip("capability", f"this vLLM ({view.vllm_version}) lacks {', '.join(view.missing)}")
    if view.failed_steps:
        return Skip("capability", f"the plugin could not do what it needs: {'; '.join(view.failed_steps)}")
    if view.op_schema:
        return Skip("op_schema", f"in this vLLM ({view.vllm_version}) {'; '.join(view.op_schema)}")
    if view.atom_active:
        return Skip("atom", "ATOM's plugin owns the model; set ATOM_DISABLE_VLLM_PLUGIN=1 to use this one instead")
    return None


def _model(view: ConfigView) -> Skip | None:
    if not view.is_mla:
        return Skip("not_mla", "the model does not use MLA attention (model, VLLM_MLA_DISABLE)")
    if view.is_sparse:
        return Skip("sparse_mla", "the model uses sparse MLA (index_topk in its config)")
    return None


def _compilation(view: ConfigView) -> Skip | None:
    if view.enforce_eager:
        return Skip("enforce_eager", "enforce_eager=True leaves no graph to rewrite; drop --enforce-eager")
    if view.mode != "VLLM_COMPILE" and view.breakable_cudagraph:
        return Skip("breakable_cudagraph", "set VLLM_USE_BREAKABLE_CUDAGRAPH=0; it runs the model uncompiled")
    if view.mode != "VLLM_COMPILE":
        return Skip("compilation_mode", f"compilation_config.mode is {view.mode}; the passes need VLLM_COMPILE")
    if view.backend != "inductor":
        return Skip("backend", f"compilation_config.backend is {view.backend!r}; the passes need 'inductor'")
    return None


def _parallel(view: ConfigView) -> Skip | None:
    if view.dcp > 1:
        return Skip("dcp", f"decode_context_parallel_size is {view.dcp}; the fast path needs 1")
    if view.pcp > 1:
        return Skip("pcp", f"prefill_context_parallel_size is {view.pcp}; the fast path needs 1")
    return None


def _cache(view: ConfigView) -> Skip | None:
    if view.hisparse:
        return Skip("hisparse", "attention_config.hisparse_config is set")
    return _kv_cache_dtype(view.kv_cache_dtype, view.model_dtype)


def _kv_cache_dtype(dtype: str, model_dtype: str) -> Skip | None:
    if dtype not in KV_CACHE_DTYPES:
        known = ", ".join(sorted(KV_CACHE_DTYPES))
        return Skip("kv_cache_dtype", f"kv_cache_dtype is {dtype!r}; the kernels write {known}")
    if dtype in ("bfloat16", "float16") and model_dtype and dtype != model_dtype:
        return Skip("kv_cache_dtype", f"kv_cache_dtype is {dtype!r} but the model computes in {model_dtype}")
    return None


def _partition(view: ConfigView) -> Skip | None:
    """Attention and KV update must lie in the same FX graph as the query projection, or there is nothing to lift."""
    if view.use_inductor_graph_partition:
        return None
    if view.splitting_ops is None:
        if view.use_inductor_graph_partition is False:
            return Skip(
                "graph_partition",
                "compilation_config.use_inductor_graph_partition=False cuts the graph at attention; "
                "leave it unset, or set it to true, or set splitting_ops=[]",
            )
        return None
    cut = [op for op in (MLA_ATTENTION_OP, KV_UPDATE_OP) if op in map(plain_name, view.splitting_ops)]
    if cut:
        return Skip(
            "splitting_ops",
            f"compilation_config.splitting_ops cuts the graph at {' and '.join(cut)}; "
            "set use_inductor_graph_partition=true with it, or splitting_ops=[], or leave both unset",
        )
    return None


def plain_name(op: str) -> str:
    """An entry of ``splitting_ops`` without the overload, which vLLM takes too."""
    return op.removesuffix(".default")


@dataclass(frozen=True)
class LayerView:
    """What admission reads of one attention layer. The defaults describe a layer that is admitted.

    Attributes:
        name: vLLM's layer name, for the message.
        missing: attributes that every layer of a known vLLM has and this one lacks; nothing else is read then.
        impl: class name of ``layer.impl``.
        known_impls: class names of the implementations that the fast path calls correctly.
        q_pad_num_heads: heads the implementation pads the query to, ``None`` without padding.
        kv_cache_ndim: dimensions of the bound KV cache; ``None`` while none is bound (compilation runs before).
        graph_dtype: what a graph computes in, where it is another dtype than the layer's; empty where it is the same.
        num_heads, qk_nope_head_dim, qk_rope_head_dim, kv_lora_rank, v_head_dim: N (per rank), P, R, L and V.
    """

    name: str = ""
    missing: tuple[str, ...] = ()
    impl: str = "AiterMLAImpl"
    known_impls: frozenset[str] = frozenset({"AiterMLAImpl"})
    own_forward: str = ""
    is_sparse: bool = False
    q_pad_num_heads: int | None = None
    has_absorbed_weight: bool = True
    amx_bmm: bool = False
    has_rope_kernel: bool = True
    kv_cache_dtype: str = "auto"
    model_dtype: str = ""
    kv_cache_ndim: int | None = None
    dcp_world_size: int = 1
    pcp_world_size: int = 1
    dcp_q_replicate: bool = False
    hisparse: bool = False
    graph_dtype: str = ""
    cos_sin_dtype_matches: bool = True
    sliding_window: bool = False
    num_heads: int = 16
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    kv_lora_rank: int = 512
    v_head_dim: int = 128


def admit_layer(view: LayerView) -> Skip | None:
    """First reason for which this layer is left to vLLM, or ``None``. One layer's skip never touches another's."""
    for check in (_implementation, _absorb, _layer_parallel, _layer_cache, _geometry):
        skip = check(view)
        if skip is not None:
            return skip
    return None


def _implementation(view: LayerView) -> Skip | None:
    if view.missing:
        return Skip("capability", f"the attention layer of this vLLM lacks {', '.join(view.missing)}")
    if view.is_sparse:
        return Skip("sparse_mla", f"{view.impl} is sparse")
    if view.impl not in view.known_impls:
        known = ", ".join(sorted(view.known_impls))
        return Skip("impl", f"attention implementation is {view.impl}; known: {known}")
    if view.own_forward:
        return Skip("unknown_forward", f"the layer's forward_impl is of {view.own_forward}, not vLLM's own")
    if view.q_pad_num_heads:
        return Skip("q_padding", f"the query is padded to {view.q_pad_num_heads} heads")
    if view.sliding_window:
        return Skip("sliding_window", "the layer has a sliding window")
    if not view.has_rope_kernel:
        return Skip("no_rope_kernel", "this build of vLLM has no concat_and_cache_mla_rope_fused")
    return None


def _absorb(view: LayerView) -> Skip | None:
    if view.amx_bmm:
        return Skip("amx_bmm", "the CPU backend packed the absorb weights for AMX; choose CPU_MLA")
    if not view.has_absorbed_weight:
        return Skip("no_absorbed_weight", "the layer has no W_UK_T, or no W_K and W_K_scale where vLLM reads these")
    return None


def _layer_parallel(view: LayerView) -> Skip | None:
    if view.dcp_world_size > 1 or view.dcp_q_replicate:
        return Skip("dcp", f"decode context parallel world size {view.dcp_world_size}; the fast path needs 1")
    if view.pcp_world_size > 1:
        return Skip("pcp", f"prefill context parallel world size {view.pcp_world_size}; the fast path needs 1")
    return None


def _layer_cache(view: LayerView) -> Skip | None:
    if view.hisparse:
        return Skip("hisparse", "the layer's KV rows are managed by HiSparse")
    if view.kv_cache_ndim not in (None, 3):
        return Skip("kv_cache_ndim", f"the KV cache has {view.kv_cache_ndim} dimensions, not 3")
    if view.graph_dtype:
        # The self-check ran in the layer's own dtype: it says nothing about another.
        message = f"the graph computes in {view.graph_dtype}, the layer's weights are for {view.model_dtype}"
        return Skip("activation_dtype", message)
    if not view.cos_sin_dtype_matches:
        return Skip("cos_sin_dtype", "the cos/sin table's dtype differs from the activations'")
    return _kv_cache_dtype(view.kv_cache_dtype, view.model_dtype)


def _geometry(view: LayerView) -> Skip | None:
    sizes = (view.num_heads, view.qk_nope_head_dim, view.qk_rope_head_dim, view.kv_lora_rank, view.v_head_dim)
    if min(sizes) <= 0 or view.qk_rope_head_dim % 2:
        n, p, r, latent, v = sizes
        return Skip("geometry", f"N={n} P={p} R={r} L={latent} V={v}: all must be positive and R even")
    return None
