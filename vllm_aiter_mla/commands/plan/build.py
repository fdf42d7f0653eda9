"""Join everything into one plan: plain containers, for ``--json`` and for the page alike."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm_aiter_mla import __version__, bucket
from vllm_aiter_mla.admission import LEVELS, Refusal
from vllm_aiter_mla.commands.plan import formulas, kernels, ranges, verdict
from vllm_aiter_mla.commands.plan.kernels import KernelSpan
from vllm_aiter_mla.commands.plan.model import ModelFacts
from vllm_aiter_mla.commands.plan.serve_options import ServeOptions
from vllm_aiter_mla.compat import version as compat_version

ENGAGED, PARTIAL, REFUSED = "engaged", "partial", "refused"


def build(options: ServeOptions, model: ModelFacts) -> dict[str, Any]:
    """The plan as plain containers."""
    limit = bucket.decode_limit(options.max_num_seqs, options.num_drafts, options.settings.max_token_num)
    reasons, heads = verdict.reasons(options, model), verdict.heads_per_rank(options, model)
    spans: tuple[KernelSpan, ...] | str | None = None
    if model.is_mla and heads:
        spans = kernels.spans(options, model, limit)
        reasons += filter(None, [_kernel_reason(spans)])
    return {
        "plugin": __version__,
        "vllm": compat_version.installed(),
        "model": asdict(model),
        "arch": options.arch,
        "options": _options(options),
        "environment": {name: [options.env.values[name], options.env.origins[name]] for name in options.env.values},
        "heads_per_rank": heads,
        "absorb_weight": verdict.weight_form(options, model) if model.is_mla else None,
        "limit": limit,
        "compile_ranges": ranges.compile_ranges(options, model, limit),
        "captures": ranges.captures(options, limit),
        "verdict": _verdict(reasons),
        "layers": {
            "mla": len(model.mla_layers),
            "total": model.layers,
            "engaged": 0 if reasons else len(model.mla_layers),
        },
        "reasons": [{"scope": _level(reason.code), **asdict(reason)} for reason in reasons],
        "kernels": None if spans is None else [asdict(span) for span in spans if not isinstance(span, str)],
        "figures": None if spans is None else _figures(options, model, limit),
        "assumptions": [*options.assumptions, *_limits_of_the_plan(options, model)],
    }


def _level(code: str) -> str:
    """Who refuses: "engine", "layer", "graph" or "kernel"."""
    return next(level for level, codes in LEVELS.items() if code in codes)


def _kernel_reason(spans: tuple[KernelSpan, ...] | str) -> Refusal | None:
    if isinstance(spans, str):
        return Refusal("kernel_unavailable", spans)
    # The server decides with one row: a back end that does not even take that leaves passes 1 and 2.
    refused = spans[0].refusals
    return Refusal("kernel_shape", refused[0][1]) if refused else None


def _figures(options: ServeOptions, model: ModelFacts, limit: int) -> dict[str, Any]:
    heads, stored = verdict.heads_per_rank(options, model), 1 if options.fp8_cache else formulas.ACT
    weight = formulas.WEIGHT[verdict.weight_form(options, model)]
    table: dict[int, dict[str, Any]] = {}
    for tokens in sorted({1, min(64, limit), limit}):
        step = formulas.Step(tokens, heads, model.nope, model.rope, model.latent, stored, weight)
        paths = {name: path(step) for name, path in formulas.PATHS.items()}
        table[tokens] = {
            name: {
                "launches": [asdict(launch) for launch in launches],
                "launches_per_step": len(launches) * len(model.mla_layers),
                "bytes": formulas.moved(launches),
            }
            for name, launches in paths.items()
        }
    return {
        "by_tokens": table,
        # Of the largest prepared query in the bucket; layers run one after the other, so one of them is alive.
        "q_prepared_bytes": limit * heads * (model.latent + model.rope) * stored,
        # The contiguous cos and sin that the AITER path keeps, once per rotary table and rank.
        "table_halves_bytes": model.max_position * model.rope * formulas.ACT,
    }


def _verdict(reasons: list[Refusal]) -> str:
    if not reasons:
        return ENGAGED
    return PARTIAL if all(reason.code == "kernel_shape" for reason in reasons) else REFUSED


def _options(options: ServeOptions) -> dict[str, Any]:
    own = ("tp", "pp", "max_num_seqs", "max_num_batched_tokens", "num_drafts", "dtype", "block_size",
           "attention_backend")  # fmt: skip
    viewed = ("dcp", "pcp", "kv_cache_dtype", "enforce_eager", "mode")
    shown = {name: getattr(options, name) for name in own} | {name: getattr(options.view, name) for name in viewed}
    return shown | {"settings": asdict(options.settings)}


def _limits_of_the_plan(options: ServeOptions, model: ModelFacts) -> list[str]:
    notes = []
    if options.pp > 1:
        notes.append(f"figures are for all layers; with --pipeline-parallel-size {options.pp} a rank holds its share")
    if options.num_drafts:
        notes.append("a draft model's own MLA layers are not planned")
    return notes
