#!/usr/bin/env python
"""Compile the Triton kernel for gfx942, gfx950 and sm90, print what the code is made of, and hold it to its bounds.

No GPU, no ROCm and no torch needed: Triton's wheel compiles for all three. Exit status 0 when every variant keeps its
bounds, 1 when one breaks a bound or does not compile, 2 for a wrong command line. The figures are static: what the code
is, never how fast it runs.

    python tools/isa_report.py
    python tools/isa_report.py --arch gfx942 --json isa.json --html isa.html
    python tools/isa_report.py --arch gfx942 --fp8-type fp8e4nv    # a software cast, planted: exits 1
"""

from __future__ import annotations

import argparse
import html
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from vllm_aiter_mla import evidence  # noqa: E402
from vllm_aiter_mla.cli import outputs  # noqa: E402

# Triton's names of the 8-bit floats; a target that lacks one breaks a bound, a word that is none is a wrong option.
FP8_TYPES = ("fp8e4nv", "fp8e4b8", "fp8e4b15", "fp8e5", "fp8e5b16")
PRINTED = Path("-")
COLUMNS = (
    ("registers", "regs"),
    ("spills", "spill"),
    ("scratch", "scratch"),
    ("lds", "LDS"),
    ("occupancy", "waves"),
    ("instructions", "instr"),
    ("matrix", "matrix"),
    ("fp8_conversions", "fp8 cvt"),
    ("wide_loads", "16B ld"),
    ("byte_stores", "1B st"),
)
# Colour-blind safe (Okabe and Ito).
COLOURS = {
    "matrix": "#0072B2",
    "fp8 conversion": "#D55E00",
    "global load": "#009E73",
    "global store": "#CC79A7",
    "LDS": "#E69F00",
    "vector": "#56B4E9",
    "scalar": "#999999",
    "other": "#BBBBBB",
}


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.worker:
        print(json.dumps(compile_target(options.worker, options.fp8_type)))
        return 0
    # One process per architecture: see vllm_aiter_mla/kernels/triton/aot.py.
    reports = [run_worker(name, options.fp8_type) | evidence.stamp("isa", 1) for name in options.arch]
    text = "\n\n".join(table(report) for report in reports)
    print(json.dumps(reports, indent=1) if options.json == PRINTED else text)
    if options.json is not None and options.json != PRINTED:
        evidence.write(options.json, reports)
    if options.html is not None:
        options.html.write_text(page(reports))
    broken = sum(len(row["breaches"]) for report in reports for row in report["rows"])
    total = sum(len(report["rows"]) for report in reports)
    print(f"\n{total} variants, {broken} broken bounds", file=sys.stderr if options.json == PRINTED else sys.stdout)
    return 1 if broken else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    names = ["gfx942", "gfx950", "sm90"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    parser.add_argument("--arch", action="append", choices=names, help="one target; may be repeated (default: all)")
    parser.add_argument("--fp8-type", choices=FP8_TYPES, help="store this Triton type instead of the target's own")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures; - prints them instead of the table"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with a chart")
    parser.add_argument("--worker", choices=names, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.arch = options.arch or names
    try:
        outputs.check({"--json": None if options.json == PRINTED else options.json, "--html": options.html})
    except outputs.OutputError as error:
        parser.error(str(error))
    return options


def run_worker(name: str, fp8_type: str | None) -> dict[str, Any]:
    """Compile one target in a process of its own; a compiler that fails is a broken bound, not a traceback."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", name]
    command += ["--fp8-type", fp8_type] if fp8_type else []
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    failure = {"label": "compilation", "figures": None, "breaches": [f"failed: {last}"]}
    return {"target": name, "triton": "unknown", "rows": [failure]}


def compile_target(name: str, fp8_type: str | None) -> dict[str, Any]:
    import triton

    from vllm_aiter_mla.kernels.triton import aot, isa

    target = aot.TARGETS[name]
    rows = []
    for variant in aot.variants(target):
        found = isa.figures(target, variant, aot.compile_variant(target, variant, fp8_type))
        breaches = isa.breaches(target, variant, found)
        rows.append({"label": variant.label, "figures": found.as_dict(), "breaches": breaches})
    return {"target": name, "triton": triton.__version__, "rows": rows}


def table(report: dict[str, Any]) -> str:
    """One target as text."""
    heading = "tile/warps, heads, type, pairs, W, cache"
    width = max(len(heading), *(len(row["label"]) for row in report["rows"]))
    waves = "per multiprocessor" if report["target"].startswith("sm") else "per SIMD"
    lines = [f"{report['target']} (triton {report['triton']}); static figures, no time is claimed; waves: {waves}"]
    lines.append(" ".join([f"{heading:<{width}}"] + [f"{s:>7}" for _, s in COLUMNS]))
    for row in report["rows"]:
        found = row["figures"]
        values = [f"{found[key] if found else '-':>7}" for key, _ in COLUMNS]
        lines.append(" ".join([f"{row['label']:<{width}}", *values]))
        lines += [f"  BROKEN: {text}" for text in row["breaches"]]
    lines.append(f"mix of {report['rows'][0]['label']}: {mix_text(report['rows'][0]['figures'])}")
    return "\n".join(lines)


def mix_text(found: dict[str, Any] | None) -> str:
    if not found:
        return "-"
    return ", ".join(f"{kind} {count}" for kind, count in sorted(found["mix"].items(), key=lambda item: -item[1]))


def page(reports: list[dict[str, Any]]) -> str:
    """One self-contained page: a stacked bar of the instruction mix per variant, and the table under it."""
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>ISA report</title>",
        "<style>body{font:14px system-ui,sans-serif;margin:2em;max-width:80em}table{border-collapse:collapse}",
        "td,th{padding:.2em .6em;text-align:right;border-bottom:1px solid #ddd}td:first-child{text-align:left}",
        ".broken{color:#b00;font-weight:bold}svg text{font:11px system-ui,sans-serif}</style>",
        "<h1>What the compiled kernel is made of</h1>",
        "<p>Static figures of the ahead-of-time compilation. They are no times.</p>",
    ]
    for report in reports:
        parts += [f"<h2>{report['target']}, Triton {html.escape(report['triton'])}</h2>", chart(report["rows"])]
        heads = "".join(f"<th>{short}</th>" for _, short in COLUMNS)
        parts.append(f"<table><tr><th>variant</th>{heads}<th>bounds</th></tr>")
        parts += [html_row(row) for row in report["rows"]]
        parts.append("</table>")
    return "\n".join([*parts, "</html>", ""])


def html_row(row: dict[str, Any]) -> str:
    found = row["figures"] or {}
    cells = "".join(f"<td>{found.get(key, '-')}</td>" for key, _ in COLUMNS)
    verdict = "; ".join(html.escape(text) for text in row["breaches"])
    state = f"<td class='broken'>{verdict}</td>" if verdict else "<td>kept</td>"
    return f"<tr><td>{html.escape(row['label'])}</td>{cells}{state}</tr>"


def chart(rows: list[dict[str, Any]]) -> str:
    """Stacked horizontal bars, instructions by kind, with a legend; inline SVG."""
    rows = [row for row in rows if row["figures"]]
    if not rows:
        return "<p>Nothing compiled.</p>"
    left, width, step = 300, 640, 20
    longest = max(row["figures"]["instructions"] for row in rows)
    height = step * (len(rows) + 2)
    parts = [f"<svg role='img' aria-label='instruction mix' width='{left + width + 60}' height='{height}'>"]
    x = left
    for kind, colour in COLOURS.items():
        parts.append(
            f"<rect x='{x}' y='4' width='10' height='10' fill='{colour}'/><text x='{x + 13}' y='13'>{kind}</text>"
        )
        x += 30 + 6 * len(kind)
    for index, row in enumerate(rows):
        y, x = step * (index + 1) + 6, float(left)
        parts.append(f"<text x='{left - 6}' y='{y + 11}' text-anchor='end'>{html.escape(row['label'])}</text>")
        for kind, colour in COLOURS.items():
            count = row["figures"]["mix"].get(kind, 0)
            span = width * count / longest
            parts.append(
                f"<rect x='{x:.1f}' y='{y}' width='{span:.1f}' height='14' fill='{colour}'>"
                f"<title>{kind}: {count}</title></rect>"
            )
            x += span
        parts.append(f"<text x='{x + 4:.1f}' y='{y + 11}'>{row['figures']['instructions']}</text>")
    return "".join([*parts, "</svg>"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
