# SPDX-License-Identifier: Apache-2.0
"""The status line: how many layers of an engine run on the fast path, on which kernels, and why the others do not."""

from collections.abc import Mapping, Sequence

from vllm_aiter_mla.admission import ABORTED, OVERFLOW, REMEDIES, VLLM_FASTER, Skip
from vllm_aiter_mla.decided import VLLM, kernel_at
from vllm_aiter_mla.status.record import MergedRecord, RankRecord, merge_ranks

NOMINAL_TOKENS = 64
"""The line gives the measured time of a step of this many tokens, or of the nearest timed count."""


def status_line(*records: RankRecord | None, dp_index: int | None = None) -> str:
    """Return the status line: how many layers are engaged, on which kernels, why the others are not, and the remedy.

    The line also names kernels that do not run because an earlier start ended in their first call.

    Args:
        records: of an engine's ranks, as ``merge_ranks`` takes them.
        dp_index: index of the data-parallel engine that the line describes; None if there is only one engine.
    """
    merged, aborted = merge_ranks(records), aborted_kernels(records)
    layers_text = _engaged_line(merged, aborted) if merged.engaged else _skipped_line(merged, aborted)
    dp_text = "" if dp_index is None else f", data-parallel engine {dp_index}"
    remedy_text = next((f" -> {remedy}" for remedy in remedies(records).values()), "")
    return f"{layers_text}{dp_text}{remedy_text}"


def _skipped_line(merged: MergedRecord, aborted: Sequence[str]) -> str:
    """Return the line of an engine that engages no layer. If a reason names the aborted kernels, do not repeat them."""
    counted_reasons = _count_reasons(merged.skipped)
    if len(counted_reasons) > 1:
        reasons_text = "; ".join(f"{count} skipped: {reason}" for reason, count in counted_reasons.items())
    else:
        reasons_text = next(iter(counted_reasons), "no MLA layer was found")
    aborted_text = "" if ABORTED in reasons_text else _aborted_text(aborted)
    return f"0/{merged.num_layers}: {reasons_text}{_missing_ranks_text(merged)}{aborted_text}"


def _engaged_line(merged: MergedRecord, aborted: Sequence[str]) -> str:
    """Return the line of an engine that engages some layer."""
    num_engaged = len(merged.engaged)
    has_ranks = merged.num_ranks > 1 and merged.is_num_ranks_known
    ranks_text = f" on {merged.num_agreeing} of {merged.num_ranks} ranks" if has_ranks else ""
    counted_reasons = _count_reasons(merged.skipped)
    skipped_text = "".join(f"; {count} skipped: {reason}" for reason, count in counted_reasons.items())
    nan_text = "".join(f"; {kernel} {OVERFLOW}" for kernel in merged.nan_kernels)
    return (
        f"{num_engaged}/{merged.num_layers} MLA layers engaged{ranks_text} ({_engaged_text(merged)})"
        f"{_fallbacks_text(merged)}{_missing_ranks_text(merged)}{skipped_text}{nan_text}{_aborted_text(aborted)}"
    )


def _missing_ranks_text(merged: MergedRecord) -> str:
    """Return how many ranks have no status, and whether the number of ranks is unknown."""
    silent_text = f"; {merged.num_silent} without a status" if merged.num_silent else ""
    return silent_text if merged.is_num_ranks_known else f"{silent_text}; ranks unknown"


def _aborted_text(aborted: Sequence[str]) -> str:
    return f"; {', '.join(aborted)} left out: {ABORTED}" if aborted else ""


def remedies(records: Sequence[RankRecord | None]) -> dict[str, str]:
    """Return the remedy of each code in the records of an engine's ranks, except codes of another version.

    Remedies come in this order: for kernels in whose first call an earlier start ended, for ranks that fell back, for
    other skipped layers, and last for layers for which vLLM's own kernels are faster.
    """
    fallback_skips = merge_ranks(records).fallback_skips_by_rank.values()
    skips = [*fallback_skips, *(skip for record in records if record is not None for skip in record.skipped.values())]
    codes = [ABORTED] * bool(aborted_kernels(records)) + [skip.code for skip in sorted(skips, key=_is_only_slower)]
    return {code: REMEDIES[code] for code in codes if code in REMEDIES}


def aborted_kernels(records: Sequence[RankRecord | None]) -> list[str]:
    """Return the kernels that do not run because an earlier start ended in their first call."""
    groups = (group for record in records if record is not None for group in record.decision_groups)
    rejected = (kernel for group in groups for kernel in group.decision.rejected_kernels)
    return list(dict.fromkeys(kernel.kernel for kernel in rejected if kernel.aborted))


def _count_reasons(skipped: Mapping[str, Skip]) -> dict[str, int]:
    """Return how many layers are skipped for each code, by the code and the first message of it on one line.

    Layers for which vLLM's own kernels are faster come last: nothing is wrong with them.
    """
    skips_by_code: dict[str, list[Skip]] = {}
    for skip in sorted(skipped.values(), key=_is_only_slower):
        skips_by_code.setdefault(skip.code, []).append(skip)
    return {_printable_reason(skips[0]): len(skips) for skips in skips_by_code.values()}


def _is_only_slower(skip: Skip) -> bool:
    return skip.code == VLLM_FASTER


def not_measured_note(card: str) -> str:
    """Return the note that nobody has timed the plugin on a card; "" for a CPU."""
    return "" if card == "cpu" else f"; speed on {card} not measured"


def _fallbacks_text(merged: MergedRecord) -> str:
    """Return which ranks fell back and which run other kernels. Ranks with the same reason are named together."""
    numbers_by_skip: dict[Skip, list[str]] = {}
    for rank, skip in merged.fallback_skips_by_rank.items():
        numbers_by_skip.setdefault(skip, []).append(str(rank))
    fallbacks = (
        f"; rank{'s' * (len(numbers) > 1)} {', '.join(numbers)} fell back: {_printable_reason(skip)}"
        for skip, numbers in numbers_by_skip.items()
    )
    other_kernels = (f"; rank {rank} runs {kernel}" for rank, kernel in merged.other_kernels_by_rank.items())
    return "".join((*fallbacks, *other_kernels))


def _engaged_text(merged: MergedRecord) -> str:
    """Return the kernels with their gain, the tuned tiles, and the integration if it is not the default one."""
    tuned_text = "".join(f"; tuned tiles {tiles}" for tiles in dict.fromkeys(merged.tuned_tiles.values()))
    integration_text = ", integration passes" if merged.first_record.integration == "passes" else ""
    kernels_text = _timing_text(merged) if merged.shape_timings else _kernels_text(merged)
    return f"{kernels_text}{tuned_text}{integration_text}"


def _kernels_text(merged: MergedRecord) -> str:
    first, kernels = merged.first_record, "+".join(sorted(set(merged.engaged.values())))
    cache = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(first.kv_cache_dtype, "fp8")
    return f"{kernels}, {cache} KV, decode limit {first.decode_limit}{not_measured_note(first.card)}"


def _timing_text(merged: MergedRecord) -> str:
    """Return which kernel runs at how many tokens and what it gains, for the most common layer shape."""
    common, *others = sorted(merged.shape_timings, key=lambda timing: -len(merged.engaged.keys() & timing.layers))
    spans = ", ".join(f"{span.kernel} {span.tokens_text}" for span in common.chosen_spans)
    tokens = min(common.medians_us, key=lambda count: abs(count - NOMINAL_TOKENS))
    medians_us = common.medians_us[tokens]
    chosen_us, vllm_us = medians_us[kernel_at(common.chosen_spans, tokens)], medians_us[VLLM]
    step = f"{tokens} token{'s' * (tokens != 1)}"
    date = f" on {common.kept_since[:10]}" if common.kept_since else ""
    others_text = f"; {len(others)} more layer shape{'s' * (len(others) != 1)} in the status file" if others else ""
    times = f"{chosen_us:.1f} us a layer at {step} against vLLM's own {vllm_us:.1f}, measured here{date}"
    return f"{spans}; {times}{others_text}"


def _printable_reason(skip: Skip) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in skip.reason)
