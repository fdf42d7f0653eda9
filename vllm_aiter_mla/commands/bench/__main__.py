"""``python -m vllm_aiter_mla.commands.bench``: the benchmark on a machine that has torch and Triton alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vllm_aiter_mla.commands.bench import command
from vllm_aiter_mla.commands.bench.points import HEADS, TOKENS


def main(arguments: list[str]) -> int:
    """Parse the command line and run; the exit status is ``command.main``'s."""
    parser = argparse.ArgumentParser(prog="python -m vllm_aiter_mla.commands.bench", description=command.__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), metavar="T")
    parser.add_argument("--heads", type=int, nargs="+", default=list(HEADS), metavar="N")
    parser.add_argument("--type", choices=list(command.KINDS), default="both")
    parser.add_argument("--rounds", type=int, default=command.DEFAULT_ROUNDS)
    parser.add_argument("--json", type=Path, help="write the figures")
    parser.add_argument("--html", type=Path, help="write a page with a chart")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bound is broken")
    o = parser.parse_args(arguments)
    return command.main(tuple(o.tokens), tuple(o.heads), o.type, o.rounds, o.json, o.html, o.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
