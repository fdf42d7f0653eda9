# SPDX-License-Identifier: Apache-2.0
"""The status line: how many layers of an engine are on the fast path, by which kernels, and why the others are not."""

from collections.abc import Mapping, Sequence

from vllm_aiter_mla.admission import ABORTED, OVERFLOW, REMEDIES
from vllm_aiter_mla.status.record import EngineRecord, RankStatus, Reason, merge_ranks

TYPICAL_TOKENS = 64
"""The line gives the measured time of a step of this many tokens, or of the nearest count that was timed."""


def status_line(*ranks: RankStatus | None, replica: int | None = None) -> str:
    """Return the status line: how many layers are engaged, by which kernels, why the others are not, and the remedy.

    It names kernels that were left out because an earlier start ended in them.

    Args:
        ranks: the records of an engine's ranks, as ``merge_ranks`` takes them.
        replica: index of the data-parallel engine that the line speaks for; None if there is one.
    """
    merged = merge_ranks(ranks)
    record, engaged = merged.record, len(merged.record.engaged)
    silent = f"; {merged.silent} without a status" if merged.silent else ""
    names = aborted(ranks)
    left_out = f"; {', '.join(names)} left out: {ABORTED}" if names else ""
    of_replica = "" if replica is None else f", data-parallel engine {replica}"
    remedy = next((f" -> {remedy}" for remedy in remedies(ranks).values()), "")
    if not engaged:
        reason = first_reason(record.skipped)
        return f"0/{record.total}: {reason}{silent}{'' if ABORTED in reason else left_out}{of_replica}{remedy}"
    agreeing = merged.ranks - len(merged.fell_back) - merged.silent
    on_ranks = f" on {agreeing} of {merged.ranks} ranks" if merged.ranks > 1 else ""
    integration = ", integration passes" if record.integration == "passes" else ""
    what_runs = f"{_measured(record) or _kernels(record)}{_tuned(record)}{integration}"
    text = f"{engaged}/{record.total} MLA layers engaged{on_ranks} ({what_runs}){_fell_back(merged)}{silent}"
    num_skipped = record.total - engaged
    text += f"; {num_skipped} skipped: {first_reason(record.skipped)}" if num_skipped else ""
    return text + "".join(f"; {name} {OVERFLOW}" for name in record.overflows) + left_out + of_replica + remedy


def _fell_back(merged: EngineRecord) -> str:
    """Return which ranks fell back, those with the same reason together; nothing if none did."""
    by_reason: dict[Reason, list[str]] = {}
    for rank, why in merged.fell_back.items():
        by_reason.setdefault(why, []).append(str(rank))
    return "".join(
        f"; rank{'s' * (len(numbers) > 1)} {', '.join(numbers)} fell back: {_printable(why)}"
        for why, numbers in by_reason.items()
    )


def remedies(ranks: Sequence[RankStatus | None]) -> dict[str, str]:
    """Return what to do about each code in the records of an engine's ranks; nothing for a code of another version.

    Kernels that were left out come first, then the layers of ranks that fell back, then others.
    """
    of_fallbacks = merge_ranks(ranks).fell_back.values()
    reasons = [*of_fallbacks, *(why for rank in ranks if rank is not None for why in rank.skipped.values())]
    codes = [ABORTED] * bool(aborted(ranks)) + [code for code, _ in reasons]
    return {code: REMEDIES[code] for code in codes if code in REMEDIES}


def aborted(ranks: Sequence[RankStatus | None]) -> list[str]:
    """Return the kernels that do not run because an earlier start ended in their first call."""
    decided = (one for rank in ranks if rank is not None for one in rank.decided)
    return list(dict.fromkeys(name for one in decided for name, why in one.passed_over if why.startswith(ABORTED)))


def _kernels(record: RankStatus) -> str:
    cache = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(record.kv_cache_dtype, "fp8")
    names = "+".join(sorted(set(record.engaged.values())))
    return f"{names}, {cache} KV, decode limit {record.decode_limit}{unmeasured(record.card)}"


def _tuned(record: RankStatus) -> str:
    """Return which tiles of the Triton kernel `--tune` has chosen; nothing for the table's."""
    return "".join(f"; tuned tiles {tiles}" for tiles in dict.fromkeys(record.tuned.values()))


def unmeasured(card: str) -> str:
    """Return what is said once of a card, because nobody has timed the plugin on one yet; nothing for a CPU."""
    return "" if card == "cpu" else f"; speed on {card} not measured"


def _measured(record: RankStatus) -> str | None:
    """Return what runs where and what it gains, for the shape of most layers; None if nothing was measured."""
    if not record.measured:
        return None
    most, *others = sorted(record.measured, key=lambda timed: -len(record.engaged.keys() & timed.layers))
    where = ", ".join(f"{name} {first}..{last}" for first, last, name in most.chosen)
    tokens = min(most.us, key=lambda count: abs(count - TYPICAL_TOKENS))
    ours, theirs = most.us[tokens][most.chosen_at(tokens)], most.us[tokens]["vllm"]
    step = f"{tokens} token{'s' * (tokens != 1)}"
    since = f" on {most.since[:10]}" if most.since else ""
    more = f"; {len(others)} more layer shape{'s' * (len(others) != 1)} in the status file" if others else ""
    return f"{where}; {ours:.1f} us a layer at {step} against vLLM's own {theirs:.1f}, measured here{since}{more}"


def first_reason(skipped: Mapping[str, Reason]) -> str:
    """Return code and reason of one skipped layer, on one line that cannot drive a terminal."""
    return _printable(next(iter(skipped.values()), ("no MLA layer was found",)))


def _printable(why: Sequence[str]) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in ": ".join(why))
