# SPDX-License-Identifier: Apache-2.0
"""The plan as lines of text."""

from collections.abc import Iterator, Sequence

from vllm_aiter_mla.admission import UNSUPPORTED_CODES
from vllm_aiter_mla.commands.outputs import one_line
from vllm_aiter_mla.commands.plan.issues import why_no_shape
from vllm_aiter_mla.commands.plan.record import Plan
from vllm_aiter_mla.decided import merge_spans

FEW = 6
WEIGHTS = {
    "plain": "in the activation dtype",
    "fp8": "in fp8 (VLLM_ROCM_USE_AITER_FP8BMM)",
    "mxfp4": "in mxfp4 (VLLM_ROCM_USE_AITER_FP4BMM, kv_b_proj in bfloat16)",
}
"""By format: vLLM holds the absorb weight and the value projection alike."""


def text(plan: Plan) -> str:
    """Return the whole page. A text from a model's config is one line, without control characters."""
    return "\n".join(map(one_line, _lines(plan)))


def table(plans: Sequence[Plan]) -> str:
    """Return one row for each plan of a model with another size of tensor parallelism."""
    first = plans[0]
    rows = [("-tp", "heads per rank", "limit", "MLA layers", "integration", "kernel, untimed")]
    for plan in plans:
        spans = [f"{span.tokens} {span.kernel}" for span in merge_spans(plan.kernels or ())]
        engaged = "not known" if plan.outcome == "unknown" else f"{plan.layers.engaged}/{plan.layers.mla}"
        why = f" ({', '.join(dict.fromkeys(reason.code for reason in plan.reasons))})" if plan.reasons else ""
        size, heads, limit = plan.options.tp, plan.heads_per_rank, plan.limit
        rows.append((str(size), str(heads), str(limit), engaged + why, plan.integration, ", ".join(spans) or "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = [f"{first.model.name} on {first.arch}, vLLM {first.vllm}, {first.options.kv_cache_dtype} cache"]
    lines += [f"WARNING: {text}" for text in first.warnings]
    for *cells, last in rows:
        lines.append("  ".join((*(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)), last)))
    return "\n".join(map(one_line, lines))


def _lines(plan: Plan) -> Iterator[str]:
    yield from _model(plan)
    yield ""
    engaged = f"{plan.layers.engaged}/{plan.layers.mla} MLA layers would engage"
    yield f"Status line: {'not known' if plan.outcome == 'unknown' else engaged}"
    for reason in plan.reasons:
        yield f"  {reason.level}: {reason.reason}"
        yield f"    -> {reason.remedy}"
    kernels = plan.kernels or ()
    for span in kernels[1:]:
        if span.kernel != kernels[0].kernel:
            yield f"  from {span.first} tokens on they would run on {span.kernel}: see below"
    yield ""
    yield from _graph_lines(plan)
    yield ""
    yield from _issues(plan)
    if plan.kernels is not None and not any(reason.code in UNSUPPORTED_CODES for reason in plan.reasons):
        yield ""
        yield from _kernels(plan)
        yield ""
        yield from _figures(plan)
    yield ""
    yield "Assumed"
    yield from (f"  - {note}" for note in plan.assumptions)
    yield from (f"  - in the example: {note}" for note in plan.model.assumed)


def _model(plan: Plan) -> Iterator[str]:
    model, options, layers = plan.model, plan.options, plan.layers
    yield f"{model.name} on {plan.arch}, vLLM {plan.vllm}, vllm-aiter-mla {plan.plugin}"
    yield from (f"  WARNING      {text}" for text in plan.warnings)
    yield f"  config       {model.source}"
    if model.basis:
        yield f"               example: {model.basis}"
    what = model.architecture + ("" if model.is_mla else ", no MLA")
    draft = f", and {layers.drafts} in the draft" if layers.drafts else ""
    own = layers.mla - layers.drafts
    yield f"  layers       {own} attentions with MLA in {layers.total} layers{draft} ({what})"
    kinds = dict[str, None]()  # a draft's layers are often those of the model
    for kind in model.kinds:
        extra = ", sparse" * kind.is_sparse + ", without RoPE" * (not kind.has_rope)
        sizes = f"P {kind.nope}, R {kind.rope}, L {kind.latent}, V {kind.v}{extra}"
        heads = f"{kind.heads} / TP {options.tp} = {kind.heads // options.tp} per rank"
        kinds[f"  heads        {heads}; {sizes}; kv_b_proj: {kind.method}, {kind.weight or 'packed'}"] = None
    yield from kinds
    for weights, count in plan.absorb_weights.items():
        share = f": {count} layers" if len(plan.absorb_weights) > 1 else ""
        yield f"  W_UK, W_UV   {WEIGHTS.get(weights, weights)}{share}"
    block = f", block {options.block_size}" if options.block_size else ""
    yield f"  KV cache     {options.kv_cache_dtype}, activations {options.dtype}{block}"


def _graph_lines(plan: Plan) -> Iterator[str]:
    """Yield the decode limit, the integration, compile ranges and captured sizes."""
    options, ranges, captures = plan.options, plan.compile_ranges, plan.captures
    by_hand = options.settings.max_token_num
    origin = f"max_num_seqs {options.max_num_seqs} x (1 + {options.num_drafts} drafts)"
    yield f"Decode limit: {plan.limit} ({f'given as {by_hand}' if by_hand is not None else origin})"
    because = plan.why_not_passes
    why = f" (the passes cannot run: {because.code})" if because and plan.integration == "module" else ""
    yield f"  integration          {plan.integration}{why}"
    shown = [f"({a}, {b}){'*' if i < ranges.inside else ''}" for i, (a, b) in enumerate(ranges.ranges)]
    footnote = "  * rewritten" if ranges.inside else ""
    yield f"  compile ranges       {' '.join(shown) + footnote if shown else ranges.note}"
    yield f"  captured inside      {_sizes(captures.inside) or captures.note or 'none'}"
    if captures.full != captures.inside:
        yield f"  as full graphs       {_sizes(captures.full) or 'none'}"
    yield f"  captured above       {_sizes(captures.outside) or 'none'}"
    largest = max((*captures.inside, 0))
    if 0 < largest < plan.limit and plan.layers.engaged:
        yield f"  {largest + 1}..{plan.limit} tokens run without a graph; max_token_num={largest} ends the decode limit"
        yield "  at the largest graph: docs/configuration.md, Where the decode limit ends"


def _issues(plan: Plan) -> Iterator[str]:
    """Yield the known faults beside the plugin: their effect is there with the flag off too."""
    why = why_no_shape(plan)
    yield f"Known issues beside the plugin{f': not looked up: {why}' if why else '' if plan.known_issues else ': none'}"
    for issue in plan.known_issues:
        yield f"  {issue.id:<11}  {issue.effect} ({issue.state})"
        yield f"{'':<15}-> {issue.remedy}"
        yield f"{'':<15}{issue.link}"


def _sizes(sizes: tuple[int, ...]) -> str:
    if len(sizes) <= 2 * FEW:
        return ", ".join(map(str, sizes))
    head, tail = (", ".join(map(str, part)) for part in (sizes[:FEW], sizes[-FEW:]))
    return f"{head}, ..., {tail} ({len(sizes)} sizes)"


def _kernels(plan: Plan) -> Iterator[str]:
    blocked = "" if plan.outcome == "engaged" else ", once the reasons above are gone"
    settings = plan.options.settings
    yield f"Kernel (option kernel={settings.kernel}){blocked}"
    if settings.has_timing:
        yield "  the start times them and vLLM's own on its card, and the fastest runs."
        yield "  With measure=false, untimed:"
    if not plan.kernels:
        yield "  none"
    reasons_above = set[str]()
    for span in plan.kernels or ():
        detail = f": {span.detail}" if span.detail else ""
        yield f"  {f'{span.tokens} tokens':<18} {span.kernel}{detail}"
        by_reason: dict[str, list[str]] = {}
        for other in span.passed_over:
            by_reason.setdefault(other.reason, []).append(other.kernel)
        for reason, names in by_reason.items():
            if reason not in reasons_above:
                yield f"{'':<21}not {', '.join(names)}: {reason}"
        reasons_above |= by_reason.keys()


def _figures(plan: Plan) -> Iterator[str]:
    figures = plan.figures
    if figures is None:
        return
    mla = figures.layers
    yield f"Query preparation and KV write of {mla} layers on one rank, absorb BMM included"
    yield "by formula (docs/configuration.md), not measured"
    rows = [("T", "path", "layer", "step", "layer", "step")]
    for tokens, paths in figures.by_tokens.items():
        for name, path in paths.items():
            count, moved = len(path.launches), path.bytes
            rows.append((f"{tokens}", name, f"{count}", f"{path.launches_per_step}", f"{moved:,}", f"{moved * mla:,}"))
    least = (4, 13, 5, 6, 11, 14)
    widths = [max(width, *(len(row[column]) for row in rows)) for column, width in enumerate(least)]
    before, launches, moved_by = (sum(widths[first : first + 2]) + 2 for first in (0, 2, 4))
    yield f"{'':<{before}}  {'launches of a':>{launches}}  {'bytes of a':>{moved_by}}"
    for row in rows:
        cells = (f"{cell:{'<' if at == 1 else '>'}{widths[at]}}" for at, cell in enumerate(row))
        yield "  ".join(cells)
    yield f"  q_prepared at the limit: {figures.q_prepared_bytes:,} bytes, one layer's at a time"
    yield f"  cos and sin halves (aiter only): {figures.table_halves_bytes:,} bytes, once per rotary table"
