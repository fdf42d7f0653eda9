#!/usr/bin/env python
"""Run the compiled Triton kernel of gfx942 or gfx950 on a CPU and compare every byte with the reference.

Every variant of tools/aot.py, as its code object stands; tools/gfx9/README.md says what is modelled and assumed. Exit
status 0 when no byte differs, 1 when one does or the code does something wrong, 2 for a wrong command line. Executed,
no time: the figures say what the code does, never how long a card takes.

    python -m tools.gfx9 --arch gfx942
    python -m tools.gfx9 --arch gfx950 --tokens 3 --variant neox --json executed.json
    python -m tools.gfx9 --arch gfx942 --cost     # counts of tools/gfx9/cost.py; status 1 when a bound is broken
    python -m tools.gfx9 --arch gfx942 --cost --against DIR     # vector time against that of a worktree's kernel
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from tools import aot
from tools.common import Parser, UsageError, guarded, writable
from vllm_aiter_mla import files

KERNEL = Path("vllm_aiter_mla/kernels/triton/kernel.py")  # in a worktree


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, checked. Raises UsageError."""
    parser = Parser(__doc__, "python -m tools.gfx9 --arch NAME [options]")
    parser.add_argument("--arch", required=True, choices=("gfx942", "gfx950"), help="one a process")
    parser.add_argument("--variant", default="", metavar="TEXT", help="only variants whose name holds this")
    parser.add_argument("--tokens", type=int, nargs="+", default=[], metavar="T", help="rows (default: the matrix)")
    parser.add_argument("--all-heads", action="store_true", help="absorb tiles of all heads, not of three")
    parser.add_argument("--cost", action="store_true", help="count what launches cost instead of comparing bytes")
    parser.add_argument("--against", type=Path, metavar="DIR", help="with --cost: compare with this worktree's kernel")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args(argv)
    if any(count < 1 for count in options.tokens):
        parser.error("--tokens: at least 1")
    if options.against is not None and not (options.cost and (options.against / KERNEL).is_file()):
        parser.error(f"--against: with --cost, a folder that holds {KERNEL}")
    if options.cost and options.all_heads:
        parser.error("--all-heads: not with --cost")
    writable({"--json": options.json})
    return options


def run(argv: Sequence[str]) -> int:
    options = parse(argv)
    target = aot.TARGETS[options.arch]
    if options.against is not None:
        return compare(target, options.variant, options.tokens, options.against, options.json)
    if options.cost:
        return count(target, options.variant, options.tokens, options.json)
    chosen = [v for v in aot.variants(target) if options.variant in v.label]
    if not chosen:
        raise UsageError(f"--variant {options.variant}: no variant of {target.name} has this in its name")
    rows, failures = execute(target, chosen, options.tokens, options.all_heads)
    write(options.json, target, rows, "gfx9")
    wrong = sum(row["different"] for row in rows)
    print(f"\n{len(chosen)} variants, {len(rows)} launches, bytes different: {wrong}, failed: {failures}")
    return 1 if wrong or failures else 0


def execute(target: aot.Target, chosen: list[aot.Variant], tokens: list[int], all_heads: bool) -> tuple[list[Any], int]:
    """Run the cases, a line for each; the records and the number of launches that stopped."""
    from tools.gfx9.cases import Compiled, matrix, record
    from tools.gfx9.parse import Fault, Skipped

    compiled = lru_cache(maxsize=1)(partial(Compiled, target))
    width = max(len(v.label) for v in chosen)
    print(f"{target.name}: executed, no time; diff: bytes that are not the reference's")
    print(f"{'variant':<{width}} {'T':>4} {'block':>5} {'instr':>10} {'diff':>10}")
    rows, failures = [], 0
    for variant in chosen:
        for case in matrix(variant, tokens):
            case = replace(case, heads=None) if all_heads else case
            try:
                rows.append(record(compiled(case.variant), case))
                said = f"{rows[-1]['instructions']:>10} {rows[-1]['different']:>10}"
            except (Fault, Skipped) as error:
                failures += 1
                said = str(error)
            print(f"{variant.label:<{width}} {case.tokens:>4} {case.variant.block_size:>5} {said}", flush=True)
    return rows, failures


def count(target: aot.Target, name: str, tokens: list[int], path: Path | None) -> int:
    from tools.gfx9 import cost

    chosen = [(v, t) for v, t in cost.points(target.name) if name in v.label and (not tokens or t in tokens)]
    _some(chosen, target, name, tokens)
    costs = cost.count(target, chosen)
    print(cost.text(target.name, costs))
    write(path, target, [asdict(one) for one in costs], "gfx9_cost")
    return 1 if cost.breaches(target.name, costs) else 0


def compare(target: aot.Target, name: str, tokens: list[int], folder: Path, path: Path | None) -> int:
    from tools.gfx9 import against

    _some(against.points(target.name, name, tokens), target, name, tokens)
    rows = against.compare(target.name, name, tokens, folder)
    print(f"{target.name}: executed and counted, no time; the busiest SIMD's vector instructions at peak clock")
    print(against.text(rows))
    write(path, target, rows, "gfx9_against")
    return 1 if any(row["ratio"] > row["goal"] for row in rows) else 0


def _some(chosen: Sequence[Any], target: aot.Target, name: str, tokens: list[int]) -> None:
    """Raise UsageError where nothing was chosen: nothing would be counted, and no bound broken."""
    if not chosen:
        asked = " ".join([*(["--variant", name] if name else []), *(["--tokens", *map(str, tokens)] if tokens else [])])
        raise UsageError(f"{asked}: --cost counts no such launch of {target.name}")


def write(path: Path | None, target: aot.Target, rows: list[Any], name: str) -> None:
    """Write the records of ``rows`` to ``path``, if there is one."""
    if path is not None:
        files.write_record(path, {"target": target.name, "rows": rows} | {files.STAMP_KEY: files.stamp(name, 1)})


if __name__ == "__main__":
    sys.exit(guarded("gfx9", run))
