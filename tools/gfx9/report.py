"""What the launches of a matrix of cases did, as records and as a table: executed, no time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tools import aot
from tools.gfx9.cases import Case, Compiled, traffic
from tools.gfx9.machine import instruction_class

# Heads whose absorb tiles run by default: the first, the last and one between. A tile of another head is the same code
# on other addresses.
SAMPLED_HEADS = (0, 77, 127)
BLOCK_SIZES = (64, 1, 16)
COLUMNS = {
    "instructions": "instr",
    "asked": "asked B",
    "line_bytes": "lines B",
    "minimum": "minimum B",
    "different": "diff",
}


def matrix(variant: aot.Variant, tokens: Sequence[int] = ()) -> Iterator[Case]:
    """The cases of one variant: row counts at the compiled block size, then the other block sizes at 17 rows.

    ``tokens`` replaces the row counts, and leaves the other block sizes out.
    """
    counts = sorted(tokens or {1, 3, 16, 17, variant.tile.block_t + 1})
    heads = tuple(h for h in SAMPLED_HEADS if h < variant.heads)
    for block_size in BLOCK_SIZES[: 1 if tokens else None]:
        for count in counts if block_size == BLOCK_SIZES[0] else [17]:
            yield Case(replace(variant, block_size=block_size), count, heads)


def run(compiled: Compiled, case: Case) -> dict[str, Any]:
    """One launch as a record for JSON; bytes are over the launch, instructions over all its waves."""
    result = compiled.run(case)
    operands = traffic(result)
    classes: Counter[str] = Counter()
    for name, count in result.counts.instructions.items():
        classes[instruction_class(name)] += count
    sums = {
        key: sum(row[key] for name, row in operands.items() if name != "arguments")
        for key in ("asked", "line_bytes", "minimum")
    }
    waves = result.counts.waves
    return {
        "label": case.variant.label,
        "tokens": case.tokens,
        "block_size": case.variant.block_size,
        "heads_run": case.variant.heads if case.heads is None else len(case.heads),
        "waves": waves,
        "instructions": sum(classes.values()),
        "per_wave": {name: round(count / waves, 1) for name, count in classes.most_common()},
        "operands": operands,
        "lds_accesses": result.counts.lds_accesses,
        "lds_conflict_cycles": result.counts.lds_conflicts,
        "different": result.different,
    } | sums


def heading(width: int) -> str:
    """Names of the columns of ``line``."""
    return f"{'variant':<{width}} {'T':>4} {'block':>5}" + "".join(f" {short:>10}" for short in COLUMNS.values())


def line(row: dict[str, Any], width: int) -> str:
    """One launch."""
    start = f"{row['label']:<{width}} {row['tokens']:>4} {row['block_size']:>5}"
    return start + "".join(f" {row[key]:>10}" for key in COLUMNS)
