#!/usr/bin/env python
"""Compile the Triton kernel for gfx942, gfx950 and sm90, print what the code is made of, and hold it to its bounds.

No GPU, no ROCm and no torch needed: Triton's wheel compiles for all three. Exit status 0 when every variant keeps its
bounds, 1 when one breaks a bound or does not compile, 2 for a wrong command line. The figures are static: what the code
is, never how fast it runs.

    python tools/isa_report.py
    python tools/isa_report.py --arch gfx942 --fp8-type fp8e4nv    # a software cast, planted: exits 1
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import aot  # noqa: E402
from tools.common import Parser, aligned, guarded, writable  # noqa: E402
from vllm_aiter_mla import files  # noqa: E402

# Triton's names of the 8-bit floats; a target that lacks one breaks a bound, a word that is none is a wrong option.
FP8_TYPES = ("fp8e4nv", "fp8e4b8", "fp8e4b15", "fp8e5", "fp8e5b16")
# In the order of ``isa.Figures``.
COLUMNS = (
    "regs", "spill", "scratch", "LDS", "waves", "instr", "matrix", "fp8 mat", "mx mat", "fp8 cvt", "16B ld", "1B st",
    "fma sel",
)  # fmt: skip


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, checked. Raises UsageError."""
    parser = Parser(__doc__, "%(prog)s [options]")
    parser.add_argument("--arch", action="append", choices=aot.TARGETS, help="one target; repeatable (default: all)")
    parser.add_argument("--fp8-type", choices=FP8_TYPES, help="store this Triton type instead of the target's own")
    parser.add_argument("--served", action="store_true", help="only the table's tiles, for caches as servers have them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--worker", choices=aot.TARGETS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    writable({"--json": options.json})
    return options


def run(argv: Sequence[str]) -> int:
    options = parse(argv)
    if options.worker:
        print(json.dumps(compile_target(options.worker, options.fp8_type, options.served)))
        return 0
    reports = [
        run_worker(name, options.fp8_type, options.served) | {files.STAMP_KEY: files.stamp("isa", 1)}
        for name in options.arch or aot.TARGETS
    ]
    print("\n\n".join(map(text, reports)))
    if options.json is not None:
        files.write_record(options.json, reports)
    rows = [row for report in reports for row in report["rows"]]
    broken = sum(len(row["breaches"]) for row in rows)
    print(f"\n{len(rows)} variants, {broken} broken bounds")
    return 1 if broken else 0


def run_worker(name: str, fp8_type: str | None, served: bool) -> dict[str, Any]:
    """Compile one target in a process of its own (see ``aot``); a compiler that fails is a broken bound."""
    command = [sys.executable, "-m", "tools.isa_report", "--worker", name]
    command += ["--fp8-type", fp8_type] if fp8_type else []
    command += ["--served"] * served
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    failure = {"label": "compilation", "figures": None, "breaches": [f"failed: {last}"]}
    return {"target": name, "triton": "unknown", "rows": [failure]}


def compile_target(name: str, fp8_type: str | None, served: bool) -> dict[str, Any]:
    """Figures and broken bounds of every variant of one target, or of ``aot.served``."""
    import triton

    from tools import isa

    target = aot.TARGETS[name]
    rows = []
    for variant in aot.served(target) if served else aot.variants(target):
        found = isa.figures(target, variant, aot.compile_variant(target, variant, fp8_type))
        breaches = isa.breaches(target, variant, found)
        rows.append({"label": variant.label, "figures": asdict(found), "breaches": breaches})
    return {"target": name, "triton": triton.__version__, "rows": rows}


def text(report: dict[str, Any]) -> str:
    """One target as a table; under each variant the bounds that it breaks."""
    waves = "per multiprocessor" if report["target"].startswith("sm") else "per SIMD"
    lines = [f"{report['target']} (triton {report['triton']}); static figures, no time is claimed; waves: {waves}"]
    cells = [[row["label"], *(row["figures"] or dict.fromkeys(COLUMNS, "-")).values()] for row in report["rows"]]
    head, *shown = aligned(["tile/warps, heads, type, pairs, W, cache", *COLUMNS], cells)
    for row, line in zip(report["rows"], shown, strict=True):
        lines += [line, *(f"  BROKEN: {breach}" for breach in row["breaches"])]
    return "\n".join([lines[0], head, *lines[1:]])


if __name__ == "__main__":
    sys.exit(guarded("isa_report", run))
