# SPDX-License-Identifier: Apache-2.0
"""The plan as lines of text."""

from collections.abc import Iterator, Sequence

from vllm_aiter_mla.admission import UNSUPPORTED_CODES
from vllm_aiter_mla.commands.outputs import one_line
from vllm_aiter_mla.commands.plan.issues import no_shape_reason
from vllm_aiter_mla.commands.plan.record import Plan
from vllm_aiter_mla.decided import merge_spans

SIZES_PER_END = 6
WEIGHT_TEXTS = {
    "plain": "in the activation dtype",
    "fp8": "in fp8 (VLLM_ROCM_USE_AITER_FP8BMM)",
    "mxfp4": "in mxfp4 (VLLM_ROCM_USE_AITER_FP4BMM, kv_b_proj in bfloat16)",
}
"""Text by format. vLLM holds the absorb weight and the value projection in the same format."""


def format_plan(plan: Plan) -> str:
    """Return the page of a plan. Text from a model's config is one line, without control characters."""
    return "\n".join(map(one_line, _plan_lines(plan)))


def format_plans(plans: Sequence[Plan]) -> str:
    """Return a table of one model's plans, with a row for each size of tensor parallelism."""
    first_plan = plans[0]
    rows = [("-tp", "heads per rank", "limit", "MLA layers", "integration", "kernel, untimed")]
    for plan in plans:
        spans = [f"{span.tokens_text} {span.kernel}" for span in merge_spans(plan.kernels or ())]
        engaged = "not known" if plan.outcome == "unknown" else f"{plan.layers.engaged}/{plan.layers.mla}"
        codes = f" ({', '.join(dict.fromkeys(reason.code for reason in plan.reasons))})" if plan.reasons else ""
        size, heads, limit = plan.options.tp, plan.heads_per_rank, plan.limit
        rows.append((str(size), str(heads), str(limit), engaged + codes, plan.integration, ", ".join(spans) or "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    model, cache = first_plan.model.name, first_plan.options.kv_cache_dtype
    lines = [f"{model} on {first_plan.arch}, vLLM {first_plan.vllm}, {cache} cache"]
    lines += [f"WARNING: {warning}" for warning in first_plan.warnings]
    for *cells, kernels in rows:
        lines.append("  ".join((*(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)), kernels)))
    return "\n".join(map(one_line, lines))


def _plan_lines(plan: Plan) -> Iterator[str]:
    yield from _model_lines(plan)
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
    yield from _issue_lines(plan)
    if plan.kernels is not None and not any(reason.code in UNSUPPORTED_CODES for reason in plan.reasons):
        yield ""
        yield from _kernel_lines(plan)
        yield ""
        yield from _figure_lines(plan)
    yield ""
    yield "Assumed"
    yield from (f"  - {note}" for note in plan.assumptions)
    yield from (f"  - in the example: {note}" for note in plan.model.assumed)


def _model_lines(plan: Plan) -> Iterator[str]:
    model, options, layers = plan.model, plan.options, plan.layers
    yield f"{model.name} on {plan.arch}, vLLM {plan.vllm}, vllm-aiter-mla {plan.plugin}"
    yield from (f"  WARNING      {warning}" for warning in plan.warnings)
    yield f"  config       {model.source}"
    if model.basis:
        yield f"               example: {model.basis}"
    architecture = model.architecture + ("" if model.is_mla else ", no MLA")
    draft = f", and {layers.drafts} in the draft" if layers.drafts else ""
    model_layers = layers.mla - layers.drafts
    yield f"  layers       {model_layers} attentions with MLA in {layers.total} layers{draft} ({architecture})"
    head_lines = dict[str, None]()  # without duplicates: a draft's layers are often like those of the model
    for kind in model.kinds:
        extra = ", sparse" * kind.is_sparse + ", without RoPE" * (not kind.has_rope)
        sizes = f"P {kind.nope}, R {kind.rope}, L {kind.latent}, V {kind.v}{extra}"
        heads = f"{kind.heads} / TP {options.tp} = {kind.heads // options.tp} per rank"
        head_lines[f"  heads        {heads}; {sizes}; kv_b_proj: {kind.method}, {kind.weight or 'packed'}"] = None
    yield from head_lines
    for weight_format, count in plan.absorb_weights.items():
        share = f": {count} layers" if len(plan.absorb_weights) > 1 else ""
        yield f"  W_UK, W_UV   {WEIGHT_TEXTS.get(weight_format, weight_format)}{share}"
    block = f", block {options.block_size}" if options.block_size else ""
    yield f"  KV cache     {options.kv_cache_dtype}, activations {options.dtype}{block}"


def _graph_lines(plan: Plan) -> Iterator[str]:
    """Yield lines with the decode limit, the integration, the compile ranges and the captured sizes."""
    options, ranges, captures = plan.options, plan.compile_ranges, plan.captures
    limit_option = options.settings.max_token_num
    origin = f"max_num_seqs {options.max_num_seqs} x (1 + {options.num_drafts} drafts)"
    yield f"Decode limit: {plan.limit} ({f'given as {limit_option}' if limit_option is not None else origin})"
    passes_skip = plan.passes_skip
    why = f" (the passes cannot run: {passes_skip.code})" if passes_skip and plan.integration == "module" else ""
    yield f"  integration          {plan.integration}{why}"
    range_texts = [f"({a}, {b}){'*' if i < ranges.num_within_limit else ''}" for i, (a, b) in enumerate(ranges.ranges)]
    footnote = "  * rewritten" if ranges.num_within_limit else ""
    yield f"  compile ranges       {' '.join(range_texts) + footnote if range_texts else ranges.note}"
    yield f"  captured inside      {_sizes(captures.within_limit) or captures.note or 'none'}"
    if captures.full != captures.within_limit:
        yield f"  as full graphs       {_sizes(captures.full) or 'none'}"
    yield f"  captured above       {_sizes(captures.above_limit) or 'none'}"
    largest_capture = max((*captures.within_limit, 0))
    if 0 < largest_capture < plan.limit and plan.layers.engaged:
        above = f"{largest_capture + 1}..{plan.limit}"
        yield f"  {above} tokens run without a graph; max_token_num={largest_capture} ends the decode limit"
        yield "  at the largest graph: docs/configuration.md, Where the decode limit ends"


def _issue_lines(plan: Plan) -> Iterator[str]:
    """Yield lines with the known issues of other code. They have their effect with the flag off too."""
    reason = no_shape_reason(plan)
    note = f": not looked up: {reason}" if reason else "" if plan.known_issues else ": none"
    yield f"Known issues outside the plugin{note}"
    for issue in plan.known_issues:
        yield f"  {issue.id:<11}  {issue.effect} ({issue.state})"
        yield f"{'':<15}-> {issue.remedy}"
        yield f"{'':<15}{issue.link}"


def _sizes(sizes: tuple[int, ...]) -> str:
    if len(sizes) <= 2 * SIZES_PER_END:
        return ", ".join(map(str, sizes))
    head, tail = (", ".join(map(str, part)) for part in (sizes[:SIZES_PER_END], sizes[-SIZES_PER_END:]))
    return f"{head}, ..., {tail} ({len(sizes)} sizes)"


def _kernel_lines(plan: Plan) -> Iterator[str]:
    condition = "" if plan.outcome == "engaged" else ", once the reasons above are gone"
    settings = plan.options.settings
    yield f"Kernel (option kernel={settings.kernel}){condition}"
    if settings.has_timing:
        yield "  the start times them and vLLM's own on its card, and the fastest runs."
        yield "  With measure=false, untimed:"
    if not plan.kernels:
        yield "  none"
    reasons_above = set[str]()
    for span in plan.kernels or ():
        detail = f": {span.detail}" if span.detail else ""
        yield f"  {f'{span.tokens_text} tokens':<18} {span.kernel}{detail}"
        by_reason: dict[str, list[str]] = {}
        for rejected in span.rejected_kernels:
            by_reason.setdefault(rejected.reason, []).append(rejected.kernel)
        for reason, names in by_reason.items():
            if reason not in reasons_above:
                yield f"{'':<21}not {', '.join(names)}: {reason}"
        reasons_above |= by_reason.keys()


def _figure_lines(plan: Plan) -> Iterator[str]:
    figures = plan.figures
    if figures is None:
        return
    num_layers = figures.num_layers
    yield f"Query preparation and KV write of {num_layers} layers on one rank, absorb BMM included"
    yield "by formula (docs/configuration.md), not measured"
    rows: list[tuple[str, ...]] = [("T", "path", "layer", "step", "layer", "step")]
    for tokens, paths in figures.by_tokens.items():
        for name, path in paths.items():
            launches = len(path.launches), path.launches_per_step
            moved_bytes = path.bytes, path.bytes * num_layers
            rows.append((str(tokens), name, *map(str, launches), *(f"{number:,}" for number in moved_bytes)))
    min_widths = (4, 13, 5, 6, 11, 14)
    widths = [max(width, *(len(row[column]) for row in rows)) for column, width in enumerate(min_widths)]
    label_width, launches_width, bytes_width = (sum(widths[first : first + 2]) + 2 for first in (0, 2, 4))
    yield f"{'':<{label_width}}  {'launches of a':>{launches_width}}  {'bytes of a':>{bytes_width}}"
    for row in rows:
        cells = (f"{cell:{'<' if column == 1 else '>'}{widths[column]}}" for column, cell in enumerate(row))
        yield "  ".join(cells)
    yield f"  q_prepared at the limit: {figures.q_prepared_bytes:,} bytes, one layer's at a time"
    yield f"  cos and sin halves (aiter only): {figures.table_halves_bytes:,} bytes, once per rotary table"
