# SPDX-License-Identifier: Apache-2.0
"""Make the record of a plan from the facts of vLLM: which layers would engage, and why others would not."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from vllm_aiter_mla import __version__, admission
from vllm_aiter_mla.admission import LayerView, Skip, integration_of, passes_skip
from vllm_aiter_mla.commands import serve_options
from vllm_aiter_mla.commands.compat import vllm_options
from vllm_aiter_mla.commands.compat.rocm_config import LayerKind
from vllm_aiter_mla.commands.compat.vllm_options import FP4_BMM, FP8_BMM, USE_AITER, VARIABLES
from vllm_aiter_mla.commands.plan import kernels, record
from vllm_aiter_mla.commands.plan.record import PlanEnvironment
from vllm_aiter_mla.commands.plan.vllm_facts import EngineFacts, LoadedVllm, VllmFacts
from vllm_aiter_mla.kernels import formulas, vllm_own
from vllm_aiter_mla.kernels.absorb import FORMATS
from vllm_aiter_mla.settings import FLAG_FIELD, LIMIT_FIELD, OPTION_PREFIX, Settings

# The matcher's reason for a layer without RoPE (passes/match.py). The matcher needs a graph, and a plan has none.
NO_ROPE = Skip("no_rope", "no rotary embedding is applied to q")
UNKNOWN_CODES = {"not_known", "config_class"}  # codes that leave open what a server would do
MAX_VALUES = {
    "max_num_seqs": ("--max-num-seqs", 2**20),
    "max_num_batched_tokens": ("--max-num-batched-tokens", 2**30),
    "block_size": ("--block-size", 2**16),
    "num_drafts": ("--speculative-config.num_speculative_tokens", 2**10),
    LIMIT_FIELD: (f"--compilation-config.pass_config.{LIMIT_FIELD} or {OPTION_PREFIX}.max_token_num", 2**30),
}
"""The option of each number, and the largest value: above that the sizes of a plan do not fit 64 bits."""


def make_plan(facts: VllmFacts, vllm: LoadedVllm, plan_environment: PlanEnvironment) -> record.Plan:
    """Return the record of a plan. Its kernels and figures are for the most frequent kind of layer.

    Raises:
        ValueError: a number is far above those of any engine.
    """
    settings, model, engine = facts.user_options.settings, facts.model, facts.engine
    numbers = {LIMIT_FIELD: settings.max_token_num, **vars(engine.options)}
    for name, (option, maximum) in MAX_VALUES.items():
        if (number := numbers[name] or 0) > maximum:
            raise ValueError(f"{option} {number}: a number up to {maximum} expected")
    # If the gate skips the engine, this is the limit that it would have set.
    sizes = engine.options.max_num_seqs, engine.options.num_drafts, settings.max_token_num
    limit = engine.gate.limit if engine.gate else admission.decode_limit(*sizes)
    kind_plans = [_plan_layer_kind(vllm.arch, settings, engine, *layer, limit) for layer in facts.layers]
    main_kind = kind_plans[0] if kind_plans else None
    num_mla_layers = sum(kind_plan.count for kind_plan in kind_plans) or model.listed_layers
    engine_skips = engine_reasons(facts)
    num_engaged = 0 if engine_skips else sum(kind_plan.count for kind_plan in kind_plans if not kind_plan.reasons)
    # If the engine is skipped, its reason also explains another attention implementation, or Transformers' forward.
    engine_codes = {reason.code for reason in engine_skips} | ({"impl"} if engine_skips else set())
    if engine.view.model_impl:
        engine_codes |= {"unknown_forward"}
    is_supported = not any(reason.code in admission.UNSUPPORTED_CODES for reason in engine_skips)
    reasons = [*engine_skips, *_layer_reasons(kind_plans if is_supported else [], num_mla_layers, engine_codes)]
    layers_by_weight_format: Counter[str] = Counter()
    for kind_plan in kind_plans:
        layers_by_weight_format[kind_plan.layer_kind.weight_format] += kind_plan.count
    num_draft_layers = sum(kind_plan.count for kind_plan in kind_plans if kind_plan.layer_kind.is_draft)
    return record.Plan(
        plugin=__version__,
        vllm=vllm.version,
        model=replace(
            model,
            notes=tuple(facts.user_options.notes),
            kinds=tuple(kind_plan.make_record() for kind_plan in kind_plans),
        ),
        arch=vllm.arch,
        options=engine.options,
        environment={name: (str(int(is_on)), "default") for name, is_on in vllm.switches.items()}
        | dict(plan_environment),
        heads_per_rank=main_kind.view.num_heads if main_kind else 0,
        absorb_weight=main_kind.layer_kind.weight_format if main_kind else None,
        absorb_weights=dict(layers_by_weight_format),
        limit=limit,
        **_graph_fields(engine, facts.user_options.settings, limit),
        outcome=_outcome(reasons, num_engaged, num_mla_layers),
        layers=record.LayerCounts(num_mla_layers, num_draft_layers, model.num_layers, num_engaged),
        reasons=tuple(reasons),
        kernels=main_kind.spans if main_kind else None,
        figures=_figures(model, main_kind, limit, engine.view.enforce_eager) if main_kind else None,
        assumptions=tuple(_assumptions(facts, vllm, plan_environment, main_kind)),
        warnings=tuple(_unknown_variable_warnings(plan_environment, vllm.version)),
    )


@dataclass(frozen=True)
class _LayerKindPlan:
    """The kernels and the reasons of one kind of layer."""

    layer_kind: LayerKind
    count: int  # of such layers
    tp: int
    prepared_heads: int  # of the largest prepared query
    reasons: tuple[Skip, ...]  # why such a layer is skipped
    spans: tuple[record.PlanSpan, ...]

    @property
    def view(self) -> LayerView:
        """The layer, for admission."""
        return self.layer_kind.view

    @property
    def has_fp8_cache(self) -> bool:
        """Whether the KV cache is in fp8."""
        return record.is_fp8_cache(self.view.kv_cache_dtype)

    def make_record(self) -> record.LayerKindRecord:
        """Return the number of such layers and their sizes, with the heads of all ranks."""
        layer_kind, (heads, nope, rope, latent, v) = self.layer_kind, self.view.sizes
        return record.LayerKindRecord(
            self.count, heads * self.tp, self.view.is_sparse, nope, rope, latent, v, layer_kind.has_rope,
            layer_kind.kv_b_proj_method, layer_kind.kv_b_proj_dtype,
        )  # fmt: skip


def _plan_layer_kind(
    arch: str, settings: Settings, engine: EngineFacts, layer_kind: LayerKind, count: int, limit: int
) -> _LayerKindPlan:
    """Return the kernels and the reasons of ``count`` layers of one kind."""
    view, heads = layer_kind.view, layer_kind.view.num_heads
    is_unpadded = vllm_own.may_take_parts(arch, heads, record.is_fp8_cache(view.kv_cache_dtype))  # as in serving.layer
    reasons = admission.layer_skips(view)
    if _integration(engine, settings) == "passes":
        reasons += [] if layer_kind.has_rope else [NO_ROPE]
    elif layer_kind.module_skip and not reasons:  # a layer with another reason needs no wrapper
        reasons = [layer_kind.module_skip]
    block_size = engine.options.block_size
    assert block_size is not None, "vLLM sets it when it builds the layers"
    decision, spans = kernels.decide_kernels(arch, settings, view, layer_kind.weight_format, block_size, limit)
    reasons += [decision.skip] if decision.skip else []
    prepared_heads = heads if is_unpadded else layer_kind.padded_heads or heads
    return _LayerKindPlan(layer_kind, count, engine.options.tp, prepared_heads, tuple(reasons), spans)


def engine_reasons(facts: VllmFacts) -> list[Skip]:
    """Return every reason to skip the engine, in the order in which a server would meet them."""
    engine, view = facts.engine, facts.engine.view
    # Eager mode sets the compilation mode, so that mode is not a second reason.
    config_skips = [
        skip
        for skip in admission.config_skips(view, facts.user_options.settings)
        if not view.enforce_eager or skip.code != "compilation_mode"
    ]
    # If AITER is off, an error of vLLM may follow from that, so it comes second.
    aiter_skips = [skip for skip in config_skips if skip.code == "aiter_off"]
    later_skips = [skip for skip in config_skips if skip not in aiter_skips]
    skips = [skip for skip in (*aiter_skips, facts.skip, *later_skips) if skip]
    if not engine.gate and not skips:
        skips.append(Skip("not_known", "the gate switched the fast path off; --verbose shows its line"))
    return skips


def _integration(engine: EngineFacts, settings: Settings) -> str:
    """Return the integration that the gate chose, or would choose if it engaged."""
    return engine.gate.integration if engine.gate else integration_of(engine.view, settings)


def _outcome(reasons: list[Skip], num_engaged: int, num_mla_layers: int) -> str:
    """Return "engaged", "some", "skipped" or "unknown"."""
    if num_mla_layers and num_engaged == num_mla_layers:
        return "engaged"
    known_reasons = [reason for reason in reasons if reason.code not in UNKNOWN_CODES]
    if len(known_reasons) < len(reasons) and not any(reason.level == "engine" for reason in known_reasons):
        return "unknown"
    return "some" if num_engaged else "skipped"


def _layer_reasons(kind_plans: list[_LayerKindPlan], num_mla_layers: int, engine_codes: set[str]) -> list[Skip]:
    """Return the reasons of layers without those of the engine. Each has its number of layers if others lack it."""
    layers_by_reason: Counter[Skip] = Counter()
    for kind_plan in kind_plans:
        layers_by_reason.update(dict.fromkeys(kind_plan.reasons, kind_plan.count))
    reasons = []
    for reason, count in layers_by_reason.items():
        if reason.code not in engine_codes:
            share_text = "" if count == num_mla_layers else f"{count} of {num_mla_layers} layers: "
            reasons.append(replace(reason, message=share_text + reason.message))
    return reasons


def _graph_fields(engine: EngineFacts, settings: Settings, limit: int) -> dict[str, Any]:
    """Return the fields of a plan for the integration, vLLM's compile ranges and its captured sizes."""
    view, sizes = engine.view, engine.graph_sizes.captured
    is_compiled = view.mode == "VLLM_COMPILE" and not view.enforce_eager
    ranges = engine.compile_ranges if is_compiled else ()
    runs_passes = engine.gate is not None and engine.gate.integration == "passes"
    no_graph_cause = "--enforce-eager" if view.enforce_eager else "CUDA graphs are off"
    return {
        "integration": _integration(engine, settings),
        "passes_skip": passes_skip(view),
        "compile_ranges": record.CompileRanges(
            ranges,
            sum(admission.is_within_limit(end, limit) for _, end in ranges) if runs_passes else 0,
            "" if is_compiled else "none: vLLM compiles no graph with these options",
        ),
        "captures": record.CapturedSizes(
            tuple(size for size in sizes if size <= limit),
            tuple(size for size in sizes if size > limit),
            "" if sizes else f"none: {no_graph_cause}",
            tuple(size for size in engine.graph_sizes.full if size <= limit),
        ),
    }


def _figures(model: record.Model, kind_plan: _LayerKindPlan, limit: int, is_eager: bool) -> record.Figures:
    """Return launches and bytes by formula, at 1 and 64 tokens and at the decode limit, for one kind of layer."""
    cache_value_bytes = 1 if kind_plan.has_fp8_cache else formulas.ACT
    heads, nope, rope, latent, _ = kind_plan.view.sizes
    by_tokens: dict[int, dict[str, record.Cost]] = {}
    for tokens in sorted({1, min(64, limit), limit}):
        step_size = formulas.StepSize(
            tokens, heads, nope, rope, latent, cache_value_bytes, FORMATS[kind_plan.layer_kind.weight_format].bytes
        )
        by_tokens[tokens] = {
            name: record.Cost(launches, len(launches) * kind_plan.count, formulas.moved(launches))
            for name, launches in formulas.paths(step_size, is_eager).items()
        }
    return record.Figures(
        kind_plan.count,
        by_tokens,
        # The largest prepared query within the limit. Layers run one after the other, so only one is alive.
        q_prepared_bytes=limit * kind_plan.prepared_heads * (latent + rope) * cache_value_bytes,
        # AITER's path keeps one contiguous copy of cos and sin for each rotary table and rank.
        table_halves_bytes=model.max_position * rope * formulas.ACT,
    )


def _assumptions(
    facts: VllmFacts, vllm: LoadedVllm, plan_environment: PlanEnvironment, main_kind: _LayerKindPlan | None
) -> Iterator[str]:
    """Yield a sentence for each default of vLLM, and for each fact that only a card can show.

    ``main_kind`` is the most frequent kind of layer. It is None without MLA.
    """
    arch, engine, settings = vllm.arch, facts.engine, facts.user_options.settings
    if vllm.has_simulated_card:
        yield (
            "vLLM finds no AMD card here (that takes torch for ROCm, and amdsmi): it ran with a simulated driver, "
            f"simulated cards and libraries of {arch}"
        )
    yield from _default_notes(facts, vllm, plan_environment)
    if facts.model.is_mla and not settings.enabled:
        yield f"pass_config.{FLAG_FIELD} is not given: planned as if it were true"
    if facts.model.is_mla:
        yield "ROCm 7 or newer, an AITER with the 15-argument op: `vllm-aiter-mla check --only machine` looks"
    for name, (value, _) in plan_environment.items():
        if name not in VARIABLES and (vllm_options.has_variable(name) or not name.startswith("VLLM_")):
            yield f"{name}={value} is passed on to vLLM, and does not change the plan"
    heads = main_kind.view.num_heads if main_kind else 0
    if main_kind and vllm_own.may_take_parts(arch, heads, main_kind.has_fp8_cache):
        yield (
            f"vLLM may decode {heads} heads by Gluon (a layer's cache up to 2 GiB), which needs no concat: vLLM then "
            "has one launch less than in the figures"
        )
    if facts.model.is_mla and _integration(engine, settings) == "module":
        yield "each layer's rotary embedding has a known class, and passes its trial at the start"
    if (stages := engine.options.pp) > 1:
        yield f"figures are for all layers; with --pipeline-parallel-size {stages} each rank has a share of them"
    yield from facts.user_options.notes


def _unknown_variable_warnings(plan_environment: PlanEnvironment, version: str) -> Iterator[str]:
    """Yield a warning for each variable with vLLM's prefix that this release does not have."""
    for name, (value, _) in plan_environment.items():
        if name.startswith("VLLM_") and name not in VARIABLES and not vllm_options.has_variable(name):
            similar = get_close_matches(name, vllm_options.variable_names(), 1, serve_options.MIN_VARIABLE_SIMILARITY)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            if name in serve_options.OLD_VARIABLES:
                hint = f": {serve_options.OLD_VARIABLES[name]}"
            yield f"{name}={value}: vLLM {version} has no variable of that name{hint}"


def _default_notes(facts: VllmFacts, vllm: LoadedVllm, plan_environment: PlanEnvironment) -> Iterator[str]:
    """Yield a sentence for each unset option and variable whose default is that of the installed vLLM."""
    arch, release = vllm.arch, vllm.version
    default_origins = {"max_num_seqs": f"the API server's default in vLLM {release} on {arch}",
                       "max_num_batched_tokens": "that server's default"}  # fmt: skip
    for name, origin in default_origins.items():
        if getattr(facts.user_options, name) is None:
            yield f"--{name.replace('_', '-')} is not given: {getattr(facts.engine.options, name)}, {origin}"
    if USE_AITER not in plan_environment:  # AITER's attention is taken by name, and no other switch has an effect
        return
    if plan_environment[USE_AITER][1] == "default":
        yield f"{USE_AITER}=1 is assumed; vLLM's default is 0: export it"
    # The fp4 switch acts on gfx950 only, and only where kv_b_proj is in bfloat16.
    if not facts.model.is_mla:
        return
    has_bf16 = any(layer_kind.kv_b_proj_dtype == "bfloat16" for layer_kind, _ in facts.layers)
    for name in (FP8_BMM, FP4_BMM) if arch == "gfx950" and has_bf16 else (FP8_BMM,):
        if name not in plan_environment:
            state, preposition, value = ("on", "without", 0) if vllm.switches[name] else ("off", "with", 1)
            default_text = f"{name} is unset: {state}, the default of vLLM {release}"
            yield f"{default_text}; plan {preposition} it by --env {name}={value}"
