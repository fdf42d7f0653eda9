# SPDX-License-Identifier: Apache-2.0
"""Decide what would engage, and why the rest would not: the record of a plan, from what vLLM answers."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from vllm_aiter_mla import __version__, admission
from vllm_aiter_mla.admission import Skip, integration_of, passes_skip
from vllm_aiter_mla.commands import serve_options
from vllm_aiter_mla.commands.compat import offline
from vllm_aiter_mla.commands.compat.offline import FP4_BMM, FP8_BMM, USE_AITER, VARIABLES
from vllm_aiter_mla.commands.compat.rocm_config import LayerKind
from vllm_aiter_mla.commands.plan import kernels, record
from vllm_aiter_mla.commands.plan.answer import Answer, EngineFacts, LoadedVllm
from vllm_aiter_mla.commands.plan.model import Variables
from vllm_aiter_mla.kernels import formulas, vllm_own
from vllm_aiter_mla.kernels.absorb import FORMATS
from vllm_aiter_mla.settings import FLAG_FIELD, LIMIT_FIELD, OPTION_PREFIX, Settings

# What the matcher says of a layer without RoPE (passes/match.py): it reads graphs, and a plan has none.
NO_ROPE = Skip("no_rope", "no rotary embedding is applied to q")
UNKNOWN = {"not_known", "config_class"}  # codes with which nobody can tell what a server would do
MOST = {
    "max_num_seqs": ("--max-num-seqs", 2**20),
    "max_num_batched_tokens": ("--max-num-batched-tokens", 2**30),
    "block_size": ("--block-size", 2**16),
    "num_drafts": ("--speculative-config.num_speculative_tokens", 2**10),
    LIMIT_FIELD: (f"--compilation-config.pass_config.{LIMIT_FIELD} or {OPTION_PREFIX}.max_token_num", 2**30),
}
"""How each number is typed, and its largest value: above it the sizes that a plan computes do not fit 64 bits."""


def record_of(answer: Answer, vllm: LoadedVllm, variables: Variables) -> record.Plan:
    """Return the record of a plan. Kernels and figures are those of the most frequent kind of layer.

    Raises:
        ValueError: a number that no engine comes near.
    """
    settings, model, engine = answer.user_options.settings, answer.model, answer.engine
    numbers = {LIMIT_FIELD: settings.max_token_num, **vars(engine.options)}
    for name, (as_typed, most) in MOST.items():
        if (number := numbers[name] or 0) > most:
            raise ValueError(f"{as_typed} {number}: a number up to {most} expected")
    # Where the gate declines, the limit that it would have set.
    sizes = engine.options.max_num_seqs, engine.options.num_drafts or 0, settings.max_token_num
    limit = engine.gate.limit if engine.gate else admission.decode_limit(*sizes)
    kinds = [_PlannedKind(vllm.arch, settings, engine, *layer, limit) for layer in answer.layers]
    main = kinds[0] if kinds else None
    total = sum(kind.count for kind in kinds) or model.listed_layers
    engine_skips = engine_reasons(answer)
    engaged = 0 if engine_skips else sum(kind.count for kind in kinds if not kind.reasons)
    # Another attention implementation follows from what stops the engine; so does Transformers' forward.
    engine_codes = {reason.code for reason in engine_skips} | ({"impl"} if engine_skips else set())
    if engine.view.model_impl:
        engine_codes |= {"unknown_forward"}
    is_supported = not any(reason.code in admission.UNSUPPORTED_CODES for reason in engine_skips)
    reasons = [*engine_skips, *_layer_reasons(kinds if is_supported else [], total, engine_codes)]
    formats: Counter[str] = Counter()
    for kind in kinds:
        formats[kind.built.format] += kind.count
    drafts = sum(kind.count for kind in kinds if kind.built.draft)
    return record.Plan(
        plugin=__version__,
        vllm=vllm.version,
        model=replace(model, notes=tuple(answer.user_options.notes), kinds=tuple(kind.sizes() for kind in kinds)),
        arch=vllm.arch,
        options=engine.options,
        environment={name: (str(int(on)), "default") for name, on in vllm.switches.items()} | dict(variables),
        heads_per_rank=main.view.num_heads if main else 0,
        absorb_weight=main.built.format if main else None,
        absorb_weights=dict(formats),
        limit=limit,
        **_graph(engine, answer.user_options.settings, limit),
        outcome=_outcome(reasons, engaged, total),
        layers=record.Layers(total, drafts, model.layers, engaged),
        reasons=tuple(reasons),
        kernels=main.spans if main else None,
        figures=_figures(model, main, limit, engine.view.enforce_eager) if main else None,
        assumptions=tuple(_assumptions(answer, vllm, variables, main)),
        warnings=tuple(_misspelt(variables, vllm.version)),
    )


class _PlannedKind:
    """What is planned for one kind of layer."""

    def __init__(
        self, arch: str, settings: Settings, engine: EngineFacts, built: LayerKind, count: int, limit: int
    ) -> None:
        self.built, self.view, self.count = built, built.view, count
        self.tp = engine.options.tp
        self.fp8_cache = record.is_fp8_cache(self.view.kv_cache_dtype)
        unpadded = vllm_own.may_take_parts(arch, self.view.num_heads, self.fp8_cache)  # as ``serving.layer`` has it
        self.out_heads = self.view.num_heads if unpadded else built.out_heads or self.view.num_heads
        self.reasons = admission.layer_skips(self.view)
        if _integration(engine, settings) == "passes":
            self.reasons += [] if built.has_rope else [NO_ROPE]
        elif built.why_not_module and not self.reasons:  # a wrapper is asked for layers that nothing else skips
            self.reasons = [built.why_not_module]
        block = engine.options.block_size
        assert block is not None, "vLLM has built the layers"
        self.decision, self.spans = kernels.planned(arch, settings, self.view, built.format, block, limit)
        self.reasons += [self.decision.skip] if self.decision.skip else []

    def sizes(self) -> record.Kind:
        """Return how many such layers there are and their sizes, with the heads of all ranks."""
        built, (heads, nope, rope, latent, v) = self.built, self.view.sizes
        return record.Kind(
            self.count, heads * self.tp, self.view.is_sparse, nope, rope, latent, v, built.has_rope, built.method,
            built.weight,
        )  # fmt: skip


def engine_reasons(answer: Answer) -> list[Skip]:
    """Return every reason for which no layer would engage, in the order in which they would stop the fast path."""
    engine, view = answer.engine, answer.engine.view
    # Eager mode sets the compilation mode, which is no reason of its own.
    every = [
        skip
        for skip in admission.config_skips(view, answer.user_options.settings)
        if not view.enforce_eager or skip.code != "compilation_mode"
    ]
    # Where AITER is off, what vLLM raises without it comes after.
    first = [skip for skip in every if skip.code == "aiter_off"]
    others = [skip for skip in every if skip not in first]
    ordered = [skip for skip in (*first, answer.skip, *others) if skip]
    if not engine.gate and not ordered:
        ordered.append(Skip("not_known", "the gate switched the fast path off; --verbose shows its line"))
    return ordered


def _integration(engine: EngineFacts, settings: Settings) -> str:
    """Return which integration runs, or would if the gate engaged."""
    return engine.gate.integration if engine.gate else integration_of(engine.view, settings)


def _outcome(reasons: list[Skip], engaged: int, total: int) -> str:
    """Return "engaged", "some", "skipped" or "unknown"."""
    if total and engaged == total:
        return "engaged"
    known = [reason for reason in reasons if reason.code not in UNKNOWN]
    if len(known) < len(reasons) and not any(reason.level == "engine" for reason in known):
        return "unknown"
    return "some" if engaged else "skipped"


def _layer_reasons(kinds: list[_PlannedKind], total: int, engine_codes: set[str]) -> list[Skip]:
    """Return each reason of layers once, with its share of them where others lack it; none that skips the engine."""
    layers: Counter[Skip] = Counter()
    for kind in kinds:
        layers.update(dict.fromkeys(kind.reasons, kind.count))
    return [
        replace(reason, message=("" if count == total else f"{count} of {total} layers: ") + reason.message)
        for reason, count in layers.items()
        if reason.code not in engine_codes
    ]


def _graph(engine: EngineFacts, settings: Settings, limit: int) -> dict[str, Any]:
    """Return which integration would run, vLLM's compile ranges, and its captured sizes."""
    view, sizes = engine.view, engine.graphs.captured
    compiled = view.mode == "VLLM_COMPILE" and not view.enforce_eager
    ranges = engine.ranges if compiled else ()
    passes = engine.gate is not None and engine.gate.integration == "passes"
    no_graph = "--enforce-eager" if view.enforce_eager else "CUDA graphs are off"
    return {
        "integration": _integration(engine, settings),
        "why_not_passes": passes_skip(view),
        "compile_ranges": record.Ranges(
            ranges,
            sum(admission.is_within_limit(end, limit) for _, end in ranges) if passes else 0,
            "" if compiled else "none: vLLM compiles no graph with these options",
        ),
        "captures": record.Captures(
            tuple(size for size in sizes if size <= limit),
            tuple(size for size in sizes if size > limit),
            "" if sizes else f"none: {no_graph}",
            tuple(size for size in engine.graphs.full if size <= limit),
        ),
    }


def _figures(model: record.Model, planned: _PlannedKind, limit: int, eager: bool) -> record.Figures:
    """Return launches and bytes by formula at 1 and 64 tokens and at the decode limit, for this kind of layer."""
    stored = 1 if planned.fp8_cache else formulas.ACT
    heads, nope, rope, latent, _ = planned.view.sizes
    table: dict[int, dict[str, record.Cost]] = {}
    for tokens in sorted({1, min(64, limit), limit}):
        size = formulas.StepSize(tokens, heads, nope, rope, latent, stored, FORMATS[planned.built.format].bytes)
        table[tokens] = {
            name: record.Cost(launches, len(launches) * planned.count, formulas.moved(launches))
            for name, launches in formulas.paths(size, eager).items()
        }
    return record.Figures(
        planned.count,
        table,
        # Of the largest prepared query up to the limit; layers run one after the other, so one of them is alive.
        q_prepared_bytes=limit * planned.out_heads * (latent + rope) * stored,
        # The contiguous cos and sin that the AITER path keeps, once per rotary table and rank.
        table_halves_bytes=model.max_position * rope * formulas.ACT,
    )


def _assumptions(answer: Answer, vllm: LoadedVllm, variables: Variables, main: _PlannedKind | None) -> Iterator[str]:
    """Yield as sentences what vLLM took by default, and what it would take from a card that is not here.

    ``main`` is the most frequent kind of layer; None without MLA.
    """
    arch, engine, settings = vllm.arch, answer.engine, answer.user_options.settings
    if vllm.is_made_up:
        yield (
            "vLLM finds no AMD card here (that takes torch for ROCm, and amdsmi): it ran with a driver, cards and "
            f"libraries made up for {arch}"
        )
    yield from _defaults(answer, vllm, variables)
    if answer.model.is_mla and not settings.enabled:
        yield f"pass_config.{FLAG_FIELD} is not given: planned as if it were true"
    if answer.model.is_mla:
        yield "ROCm 7 or newer, an AITER with the 15-argument op: `vllm-aiter-mla check --only machine` looks"
    for name, (value, _) in variables.items():
        if name not in VARIABLES and (offline.has_variable(name) or not name.startswith("VLLM_")):
            yield f"{name}={value} is passed on to vLLM: the plan does not look at it"
    heads = main.view.num_heads if main else 0
    if main and vllm_own.may_take_parts(arch, heads, main.fp8_cache):
        yield (
            f"vLLM may decode {heads} heads by Gluon (a layer's cache up to 2 GiB), which needs no concat: vLLM then "
            "has a launch less than the figures say"
        )
    if answer.model.is_mla and _integration(engine, settings) == "module":
        yield "each layer's rotary embedding has a known class, and start-up's trial finds that it rotates by its table"
    if (stages := engine.options.pp) > 1:
        yield f"figures are for all layers; with --pipeline-parallel-size {stages} a rank holds its share"
    yield from answer.user_options.notes


def _misspelt(variables: Variables, version: str) -> Iterator[str]:
    """Yield a sentence for each of vLLM's variables that this release does not have."""
    for name, (value, _) in variables.items():
        if name.startswith("VLLM_") and name not in VARIABLES and not offline.has_variable(name):
            similar = get_close_matches(name, offline.variables(), 1, serve_options.SIMILAR_VARIABLE)
            meant = f"; did you mean {similar[0]}?" if similar else ""
            if name in serve_options.GONE_VARIABLES:
                meant = f": {serve_options.GONE_VARIABLES[name]}"
            yield f"{name}={value}: vLLM {version} has no variable of that name{meant}"


def _defaults(answer: Answer, vllm: LoadedVllm, variables: Variables) -> Iterator[str]:
    """Yield a sentence for each option and variable that is not given and has a default of the installed vLLM."""
    arch, release = vllm.arch, vllm.version
    batch = {"max_num_seqs": f"the API server's default in vLLM {release} on {arch}",
             "max_num_batched_tokens": "that server's default"}  # fmt: skip
    for name, whose in batch.items():
        if getattr(answer.user_options, name) is None:
            yield f"--{name.replace('_', '-')} is not given: {getattr(answer.engine.options, name)}, {whose}"
    if variables[USE_AITER][1] == "default":
        yield f"{USE_AITER}=1 is assumed; vLLM's default is 0: export it"
    # The fp4 switch acts on gfx950 only, and only where kv_b_proj is in bfloat16.
    if not answer.model.is_mla:
        return
    bf16 = any(kind.weight == "bfloat16" for kind, _ in answer.layers)
    for name in (FP8_BMM, FP4_BMM) if arch == "gfx950" and bf16 else (FP8_BMM,):
        if name not in variables:
            state, other, value = ("on", "without", 0) if vllm.switches[name] else ("off", "with", 1)
            yield f"{name} is unset: {state}, the default of vLLM {release}; plan {other} it by --env {name}={value}"
