#!/usr/bin/env python
"""Compare serving with the plugin's flag off and on by vLLM's own serving benchmark, and write a Markdown table.

Starts the servers itself, one at a time; what stands after ``--`` goes to both as it would to `vllm serve`:

    python tools/serve_bench.py deepseek-ai/DeepSeek-R1 --out r1.md --json r1.json -- -tp 8 --kv-cache-dtype fp8
    python tools/serve_bench.py MODEL --lengths 1024/0/1024 --lengths 128/896/256 --rates 1,10,50 -- ...
    python tools/serve_bench.py MODEL --off-url http://127.0.0.1:8000 --on-url http://127.0.0.1:8001
    python tools/serve_bench.py --small-model

With the flag on layers must engage, or there is no table. See docs/benchmarks.md for the protocol and its limits.

Exit status 0; 1 when a server or client failed, nothing engaged, or a request failed; 2 for a wrong option.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.common import guarded, positive
from tools.serving import bench, options, page, small, sweep

TOOL = "serve_bench"
# Rates: from a server that is almost idle to a full one. Lengths: ours, because the rows of vLLM's PR #35879 were not
# at hand; decode-heavy enough for TPOT to have 256 samples a request, and no shared prefix.
DEFAULTS = {"rates": "1,2.5,5,10,25,50", "lengths": ["1024/0/256"], "prompts": 200, "warmups": 16}
SMALL = {"rates": "4,16", "lengths": ["32/16/16"], "prompts": 16, "warmups": 16}
NOT_CLAIMED = (
    "Anything about sampling other than greedy, natural prompts, or answers of natural length: prompts are random "
    "tokens, and every answer has exactly output-len tokens.",
    "Anything about quality: see tools/accuracy.py.",
)


def read(argv: Sequence[str]) -> argparse.Namespace:
    """The options, checked; adds ``points``. Raises ``UsageError``."""
    made = options.parser(__doc__)
    made.add_argument("--rates", help=f"requests per second, with commas (default {DEFAULTS['rates']})")
    made.add_argument(
        "--lengths", action="append", metavar="INPUT/PREFIX/OUTPUT", help="tokens; repeatable (default 1024/0/256)"
    )
    made.add_argument("--prompts", type=int, help="requests per point (default 200)")
    made.add_argument("--warmups", type=int, help="requests before each point (default 16)")
    given = options.read(made, argv, DEFAULTS, SMALL)
    positive("--prompts", given.prompts)
    positive("--warmups", given.warmups)
    rates = options.number_list("--rates", given.rates)
    given.points = [bench.Point(*bench.lengths(text), rate) for text in given.lengths for rate in rates]
    given.tool = TOOL
    return given


def protocol(given: argparse.Namespace) -> list[str]:
    """What was sent, in words."""
    return [
        f"client: `vllm bench serve` of the vLLM above, random dataset, {given.prompts} requests per point, Poisson "
        "arrivals at rr requests per second, greedy, end-of-text ignored; the prefix comes on top of input-len",
        f"{given.warmups} requests before each point, thrown away; they repeat the point's first prompt",
        f"seeds {given.seed} + 1000 x run + point: the same prompts and arrivals on both sides, others in every run",
        "ttft and tpot are the benchmark's means over requests, here their mean over runs ± the standard error of that "
        "mean; off/on above 1 means that on took less time",
        "a row with a failed or short answer is invalid; differences below two combined standard errors are called "
        "not distinguishable",
    ]


def run(argv: Sequence[str]) -> int:
    """Measure, write, and return the exit status."""
    given = read(argv)
    sweep.check(given)
    work = options.work_folder(given)
    about, model = page.machine(), small.prepare(given, work)
    compared = sweep.compare(given, model, work, sweep.BENCH, bench.fixed(given, model), bench.asked(given))
    rows = bench.rows(compared.results, given.points, given.prompts)
    title = f"Serving with the fast path off and on: {'the small random model' if given.small_model else given.model}"
    measured = {"rows": [asdict(row) for row in rows], "results": compared.results}
    tables = bench.tables(rows, judged=not given.small_model)
    page.finish(title, compared, about, protocol(given), tables, NOT_CLAIMED, measured)
    return 1 if any(row.invalid for row in rows) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return guarded(TOOL, lambda: run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
