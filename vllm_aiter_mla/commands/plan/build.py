"""Join everything into one plan: plain containers, for ``--json`` and for the page alike."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm_aiter_mla import __version__, bucket
from vllm_aiter_mla.commands.plan import formulas, kernels, ranges, verdict
from vllm_aiter_mla.commands.plan.model import ModelFacts
from vllm_aiter_mla.commands.plan.serve_options import ServeOptions
from vllm_aiter_mla.commands.plan.verdict import Reason
from vllm_aiter_mla.compat import vllm_version

ENGAGED, PARTIAL, REFUSED = "engaged", "partial", "refused"


def build(options: ServeOptions, model: ModelFacts) -> dict[str, Any]:
    """The plan as plain containers."""
    limit = bucket.decode_limit(options.max_num_seqs, options.num_drafts, options.settings.max_token_num)
    reasons = list(verdict.reasons(options, model))
    kernel = _kernel(options, model, limit) if model.is_mla and verdict.heads_per_rank(options, model) else None
    if kernel is not None and kernel["reason"] is not None:
        reasons.append(kernel["reason"])
    return {
        "plugin": __version__,
        "vllm": vllm_version.installed(),
        "model": asdict(model),
        "arch": options.arch,
        "options": _options(options),
        "environment": {name: [options.env.values[name], options.env.origins[name]] for name in options.env.values},
        "heads_per_rank": verdict.heads_per_rank(options, model),
        "limit": limit,
        "compile_ranges": asdict(ranges.compile_ranges(options, model, limit)),
        "captures": asdict(ranges.captures(options, limit)),
        "verdict": _verdict(reasons),
        "layers": {"mla": len(model.mla_layers), "total": model.layers, "engaged": _engaged(reasons, model)},
        "reasons": [asdict(reason) for reason in reasons],
        "kernels": None if kernel is None else [asdict(span) for span in kernel["spans"]],
        "figures": _figures(options, model, limit) if kernel is not None else None,
        "assumptions": [*options.assumptions, *_limits_of_the_plan(options, model)],
    }


def _kernel(options: ServeOptions, model: ModelFacts, limit: int) -> dict[str, Any]:
    shape = kernel_shape(options, model)
    asked, arch = options.settings.kernel, options.arch
    missing = kernels.unavailable(asked, arch)
    if missing is not None:
        return {"spans": (), "reason": Reason("kernel", "kernel_unavailable", missing)}
    spans = kernels.spans(asked, arch, shape, limit, options.settings.aiter_view)
    # The runtime asks with one row: a back end that does not even take that leaves passes 1 and 2.
    refused = spans[0].refusals
    return {"spans": spans, "reason": Reason("kernel", "kernel_shape", refused[0][1]) if refused else None}


def kernel_shape(options: ServeOptions, model: ModelFacts) -> kernels.LayerKernelShape:
    """What decides the kernel of the model's layers on one rank."""
    import torch

    return kernels.LayerKernelShape(
        heads=verdict.heads_per_rank(options, model),
        nope=model.nope,
        rope=model.rope,
        latent=model.latent,
        act=getattr(torch, options.dtype, torch.bfloat16),
        quantised=options.fp8_cache,
        block_size=options.block_size,
        fp8_absorb=verdict.fp8_absorb(options, model),
    )


def _figures(options: ServeOptions, model: ModelFacts, limit: int) -> dict[str, Any]:
    heads, stored = verdict.heads_per_rank(options, model), 1 if options.fp8_cache else formulas.ACT
    table = {}
    weight = 1 if verdict.fp8_absorb(options, model) else formulas.ACT
    for tokens in sorted({1, min(64, limit), limit}):
        step = formulas.Step(tokens, heads, model.nope, model.rope, model.latent, stored, weight)
        table[tokens] = {
            name: {
                "launches": [asdict(launch) for launch in path(step)],
                "launches_per_step": len(path(step)) * len(model.mla_layers),
                "bytes": formulas.moved(path(step)),
            }
            for name, path in formulas.PATHS.items()
        }
    return {
        "by_tokens": table,
        "q_prepared_bytes": formulas.q_prepared_bytes(limit, heads, model.latent + model.rope, stored),
        "table_halves_bytes": formulas.table_halves_bytes(model.max_position, model.rope),
    }


def _verdict(reasons: list[Reason]) -> str:
    if not reasons:
        return ENGAGED
    return PARTIAL if all(reason.code == "kernel_shape" for reason in reasons) else REFUSED


def _engaged(reasons: list[Reason], model: ModelFacts) -> int:
    return len(model.mla_layers) if _verdict(reasons) == ENGAGED else 0


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
