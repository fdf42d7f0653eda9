# SPDX-License-Identifier: Apache-2.0
"""The status line: how many layers of an engine are on the fast path, by which kernels, and why the others are not."""

from collections.abc import Mapping, Sequence

from vllm_aiter_mla.admission import ABORTED, OVERFLOW, REMEDIES, Skip
from vllm_aiter_mla.decided import VLLM, kernel_at
from vllm_aiter_mla.status.record import MergedStatus, RankStatus, merge_ranks

TYPICAL_TOKENS = 64
"""The line gives the measured time of a step of this many tokens, or of the nearest count that was timed."""


def status_line(*records: RankStatus | None, replica: int | None = None) -> str:
    """Return the status line: how many layers are engaged, by which kernels, why the others are not, and the remedy.

    The line also names kernels that do not run because an earlier start ended in their first call.

    Args:
        records: those of an engine's ranks, as ``merge_ranks`` takes them.
        replica: index of the data-parallel engine that the line speaks for; None if there is only one.
    """
    merged, kernels = merge_ranks(records), aborted_kernels(records)
    silent = f"; {merged.silent} without a status" if merged.silent else ""
    without = f"; {', '.join(kernels)} left out: {ABORTED}" if kernels else ""
    of_replica = "" if replica is None else f", data-parallel engine {replica}"
    remedy = next((f" -> {remedy}" for remedy in remedies(records).values()), "")
    if not merged.engaged:
        reason = first_reason(merged.skipped)
        if ABORTED in reason:  # the reason tells of these kernels already
            without = ""
        return f"0/{merged.total}: {reason}{silent}{without}{of_replica}{remedy}"
    engaged, skipped = len(merged.engaged), merged.total - len(merged.engaged)
    on_ranks = f" on {merged.agreeing} of {merged.ranks} ranks" if merged.ranks > 1 else ""
    text = f"{engaged}/{merged.total} MLA layers engaged{on_ranks} ({_running_text(merged)})"
    text += f"{_fallbacks_text(merged)}{silent}"
    text += f"; {skipped} skipped: {first_reason(merged.skipped)}" if skipped else ""
    return text + "".join(f"; {kernel} {OVERFLOW}" for kernel in merged.overflows) + without + of_replica + remedy


def remedies(records: Sequence[RankStatus | None]) -> dict[str, str]:
    """Return the remedy of each code in the records of an engine's ranks, except codes of another version.

    The remedy for kernels that an earlier start ended in comes first, then those of ranks that fell back, then others.
    """
    of_fallbacks = merge_ranks(records).fell_back.values()
    skips = [*of_fallbacks, *(skip for record in records if record is not None for skip in record.skipped.values())]
    codes = [ABORTED] * bool(aborted_kernels(records)) + [skip.code for skip in skips]
    return {code: REMEDIES[code] for code in codes if code in REMEDIES}


def aborted_kernels(records: Sequence[RankStatus | None]) -> list[str]:
    """Return the kernels that do not run because an earlier start ended in their first call."""
    groups = (group for record in records if record is not None for group in record.decided)
    rejected = (kernel for group in groups for kernel in group.decision.passed_over)
    return list(dict.fromkeys(kernel.kernel for kernel in rejected if kernel.aborted))


def first_reason(skipped: Mapping[str, Skip]) -> str:
    """Return code and message of the first skipped layer, on one line that cannot drive a terminal."""
    return next((_printable(skip) for skip in skipped.values()), "no MLA layer was found")


def not_measured_note(card: str) -> str:
    """Return the note that nobody has timed the plugin on a card; nothing for a CPU."""
    return "" if card == "cpu" else f"; speed on {card} not measured"


def _fallbacks_text(merged: MergedStatus) -> str:
    """Return which ranks fell back, those with the same reason together, and which run other kernels."""
    numbers_by_skip: dict[Skip, list[str]] = {}
    for rank, skip in merged.fell_back.items():
        numbers_by_skip.setdefault(skip, []).append(str(rank))
    fell_back = (
        f"; rank{'s' * (len(numbers) > 1)} {', '.join(numbers)} fell back: {_printable(skip)}"
        for skip, numbers in numbers_by_skip.items()
    )
    others = (f"; rank {rank} runs {kernel}" for rank, kernel in merged.other_kernels.items())
    return "".join((*fell_back, *others))


def _running_text(merged: MergedStatus) -> str:
    """Return which kernels run and what they gain, tuned tiles, and the integration if it is not the default."""
    tuned = "".join(f"; tuned tiles {tiles}" for tiles in dict.fromkeys(merged.tuned.values()))
    integration = ", integration passes" if merged.first.integration == "passes" else ""
    return f"{_timing_text(merged) if merged.measured else _kernels_text(merged)}{tuned}{integration}"


def _kernels_text(merged: MergedStatus) -> str:
    first, names = merged.first, "+".join(sorted(set(merged.engaged.values())))
    cache = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(first.kv_cache_dtype, "fp8")
    return f"{names}, {cache} KV, decode limit {first.decode_limit}{not_measured_note(first.card)}"


def _timing_text(merged: MergedStatus) -> str:
    """Return which kernel runs at how many tokens and what it gains, for the layer shape of most layers."""
    most, *others = sorted(merged.measured, key=lambda timed: -len(merged.engaged.keys() & timed.layers))
    where = ", ".join(f"{span.kernel} {span.tokens}" for span in most.chosen)
    tokens = min(most.us, key=lambda count: abs(count - TYPICAL_TOKENS))
    ours, theirs = most.us[tokens][kernel_at(most.chosen, tokens)], most.us[tokens][VLLM]
    step = f"{tokens} token{'s' * (tokens != 1)}"
    since = f" on {most.since[:10]}" if most.since else ""
    more = f"; {len(others)} more layer shape{'s' * (len(others) != 1)} in the status file" if others else ""
    return f"{where}; {ours:.1f} us a layer at {step} against vLLM's own {theirs:.1f}, measured here{since}{more}"


def _printable(skip: Skip) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in skip.reason)
