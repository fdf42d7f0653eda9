"""Join everything into one plan: plain containers, for ``--json`` and for the page alike."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from vllm_aiter_mla import __version__, admission
from vllm_aiter_mla.admission import LEVELS, ConfigView, Skip, integration_of, why_not_passes
from vllm_aiter_mla.commands.plan import formulas, kernels, outcome, ranges, serve_options
from vllm_aiter_mla.commands.plan.kernels import KernelSpan
from vllm_aiter_mla.commands.plan.model import Kind, ModelFacts
from vllm_aiter_mla.commands.plan.serve_options import ServeOptions
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.kernels import vllm_own

ENGAGED, SOME, PARTIAL, REFUSED, UNKNOWN = "engaged", "some", "partial", "skipped", "unknown"


def build(options: ServeOptions, model: ModelFacts) -> dict[str, Any]:
    """The plan as plain containers. Kernels and figures are those of the most frequent kind of layer."""
    limit = admission.decode_limit(options.max_num_seqs, model.vllm.num_drafts, options.settings.max_token_num)
    against = outcome.engine_reasons(options, model)
    view = outcome.config_view(options, model)
    cut = why_not_passes(view)
    kinds = [_Planned(options, model, kind, limit) for kind in model.kinds]
    main = kinds[0] if kinds else None
    total = sum(kind.count for kind in model.kinds)
    engaged = 0 if against else sum(planned.kind.count for planned in kinds if not planned.reasons)
    reasons = _once([*against, *(reason for planned in kinds for reason in planned.told(total))])
    bf16 = any(kind.layer.weight == "bfloat16" for kind in model.kinds)
    return {
        "plugin": __version__,
        "vllm": compat_config.vllm_version(),
        "model": model.as_record(),
        "arch": options.arch,
        "options": _options(options, model),
        "environment": {name: [options.env.values[name], options.env.origins[name]] for name in options.env.values},
        "heads_per_rank": main.heads if main else 0,
        "absorb_weight": main.form if main else None,
        "absorb_weights": {
            form: sum(p.kind.count for p in kinds if p.form == form) for form in {p.form for p in kinds}
        },
        "limit": limit,
        "integration": integration_of(view),
        "why_not_passes": None if cut is None else asdict(cut),
        "compile_ranges": ranges.compile_ranges(options, model, limit, view),
        "captures": ranges.captures(options, model, limit),
        "outcome": _outcome(reasons, against, engaged, total),
        "layers": {
            "mla": total,
            "drafts": len(model.vllm.draft_layers),
            "total": model.vllm.layers,
            "engaged": engaged,
        },
        "reasons": [{"scope": _level(reason.code), **asdict(reason)} for reason in reasons],
        "kernels": main.kernels() if main else None,
        "figures": _figures(options, model, main, limit) if main and main.spans is not None else None,
        "assumptions": [
            *options.assumptions,
            *serve_options.about_the_card(options, bf16),
            *model.vllm.notes,
            *_of_vllm(options, model, main),
            *_limits_of_the_plan(options, view),
        ],
    }


def _of_vllm(options: ServeOptions, model: ModelFacts, main: _Planned | None) -> list[str]:
    if main is None or not vllm_own.may_take_parts(options.arch, main.heads, model.fp8_cache):
        return []
    return [
        f"vLLM may decode {main.heads} heads by Gluon (a layer's cache up to 2 GiB), which needs no concat: vLLM then "
        "has a launch less than the figures say"
    ]


class _Planned:
    """What is planned for one kind of layer."""

    def __init__(self, options: ServeOptions, model: ModelFacts, kind: Kind, limit: int) -> None:
        self.kind = kind
        self.heads = outcome.heads_per_rank(options, kind.layer.heads)
        self.form = outcome.weight_form(options, kind.layer)
        self.spans: tuple[KernelSpan, ...] | str | None = None
        self.reasons = outcome.layer_reasons(options, model, kind)
        if self.heads and not kind.layer.unknown:
            self.spans = kernels.spans(options, model, kind, limit)
            self.reasons += filter(None, [_kernel_reason(self.spans)])

    def told(self, total: int) -> list[Skip]:
        """The reasons; with their share of the layers where others are of another kind."""
        share = "" if self.kind.count == total else f"{self.kind.count} of {total} layers: "
        return [replace(reason, message=share + reason.message) for reason in self.reasons]

    def kernels(self) -> list[dict[str, Any]] | None:
        return None if self.spans is None else [asdict(span) for span in self.spans if not isinstance(span, str)]


def _once(reasons: list[Skip]) -> list[Skip]:
    """Each reason once; one of the engine as a whole is not said again of its layers."""
    found: dict[str, list[Skip]] = {}
    for reason in reasons:
        if reason.code not in found or " layers: " in reason.message:
            found.setdefault(reason.code, []).append(reason)
    return [reason for same in found.values() for reason in same]


def _level(code: str) -> str:
    """Who refuses: "engine", "layer", "graph" or "kernel"."""
    return next(level for level, codes in LEVELS.items() if code in codes)


def _kernel_reason(spans: tuple[KernelSpan, ...] | str) -> Skip | None:
    if isinstance(spans, str):
        return Skip("kernel_unavailable", spans)
    # The server decides with one row: a back end that does not even take that leaves pass 1.
    skipped = spans[0].skips
    return Skip("kernel_shape", skipped[0][1]) if skipped else None


def _figures(options: ServeOptions, model: ModelFacts, planned: _Planned, limit: int) -> dict[str, Any]:
    layer, stored = planned.kind.layer, 1 if model.fp8_cache else formulas.ACT
    weight = formulas.WEIGHT[planned.form]
    table: dict[int, dict[str, Any]] = {}
    for tokens in sorted({1, min(64, limit), limit}):
        step = formulas.Step(tokens, planned.heads, layer.nope, layer.rope, layer.latent, stored, weight)
        paths = {name: path(step) for name, path in formulas.PATHS.items()}
        table[tokens] = {
            name: {
                "launches": [asdict(launch) for launch in launches],
                "launches_per_step": len(launches) * planned.kind.count,
                "bytes": formulas.moved(launches),
            }
            for name, launches in paths.items()
        }
    return {
        "layers": planned.kind.count,
        "by_tokens": table,
        # Of the largest prepared query below the limit; layers run one after the other, so one of them is alive.
        "q_prepared_bytes": limit * planned.heads * (layer.latent + layer.rope) * stored,
        # The contiguous cos and sin that the AITER path keeps, once per rotary table and rank.
        "table_halves_bytes": model.vllm.max_position * layer.rope * formulas.ACT,
    }


def _outcome(reasons: list[Skip], against: list[Skip], engaged: int, total: int) -> str:
    if total and engaged == total:
        return ENGAGED
    codes = {reason.code for reason in reasons}
    if "not_known" in codes and {reason.code for reason in against} <= {"not_known"}:
        return UNKNOWN
    if engaged:
        return SOME
    return PARTIAL if codes == {"kernel_shape"} else REFUSED


def _options(options: ServeOptions, model: ModelFacts) -> dict[str, Any]:
    own = ("tp", "pp", "max_num_seqs", "max_num_batched_tokens", "block_size", "attention_backend")
    viewed = ("dcp", "pcp", "enforce_eager", "mode")
    shown = {name: getattr(options, name) for name in own} | {name: getattr(options.view, name) for name in viewed}
    answered = {
        "num_drafts": model.vllm.num_drafts,
        "dtype": model.vllm.dtype,
        "kv_cache_dtype": model.vllm.cache_dtype,
    }
    return shown | answered | {"settings": asdict(options.settings)}


def _limits_of_the_plan(options: ServeOptions, view: ConfigView) -> list[str]:
    found = []
    if integration_of(view) == "module":
        found.append(
            "the module integration asks each layer's wrapper and rotary embedding after loading; plan does not"
        )
    if options.pp > 1:
        found.append(f"figures are for all layers; with --pipeline-parallel-size {options.pp} a rank holds its share")
    return found
