"""``vllm-aiter-mla bench``: time the one launch against the unfused sequence on this machine's GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def bench(
    tokens: Annotated[list[int] | None, typer.Option("--tokens", "-t", help="T to measure; may be repeated.")] = None,
    heads: Annotated[list[int] | None, typer.Option("--heads", "-n", help="N to measure; may be repeated.")] = None,
    kind: Annotated[str, typer.Option("--type", help="fp8, bf16 or both.")] = "both",
    rounds: Annotated[int, typer.Option(help="Replays per path and point; the median counts.")] = 50,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with a chart to this file.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit 1 when a bound is broken.")] = False,
) -> None:
    """Time the one Triton launch against the unfused sequence, plain PyTorch and AITER. Needs a GPU; exits 2 without.

    Every path is captured in a graph and replayed over operands that do not fit in the cache; the table gives
    microseconds, the ratio to the best unfused sequence, GB/s beside a copy measured in the same run, and launches.
    """
    from vllm_aiter_mla.commands.bench import command
    from vllm_aiter_mla.commands.bench.points import HEADS, TOKENS

    status = command.main(tuple(tokens or TOKENS), tuple(heads or HEADS), kind, rounds, json, html, check)
    raise typer.Exit(status)
