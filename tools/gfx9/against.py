"""Vector instructions of large launches against those of another commit's kernel, and what they may at most be."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tools import aot
from tools.common import RunError, aligned
from tools.gfx9 import cost
from vllm_aiter_mla.kernels.triton import tiles

ROOT = Path(__file__).parents[2]
# Of the time before gfx942 rounded two values an instruction (commit f8c23048), by format of the weight.
GOALS = {"gfx942": {"plain": 0.80, "fp8": 0.85}, "gfx950": {"plain": 1.0, "fp8": 1.0}}
# The package comes from the folder, everything else from here.
CHILD = """
import json, sys, tools
sys.path.insert(0, sys.argv[1])
import vllm_aiter_mla
from tools.gfx9 import against
print(json.dumps(against.times(*json.loads(sys.argv[2]))))
"""


def points(arch: str, name: str, tokens: Sequence[int]) -> list[tuple[aot.Variant, int]]:
    """Return the launches whose arithmetic takes as long as their bytes, with a large cache; filtered as ``--cost``."""
    found = []
    for (weight, major), heads, rows in product((("plain", "L"), ("plain", "P"), ("fp8", "P")), (32, 128), (256, 512)):
        hint = aot.hints(aot.TARGETS[arch])[-1]
        tile = tiles.tile_for(arch, rows, heads)
        found.append((aot.Variant(tile, heads, weight=weight, weight_major=major, pointer_hint=hint), rows))
    return [(variant, rows) for variant, rows in found if name in variant.label and (not tokens or rows in tokens)]


def times(arch: str, name: str, tokens: Sequence[int]) -> list[float]:
    """Return ``vector_us`` of each launch."""
    return [one.vector_us for one in cost.count(aot.TARGETS[arch], points(arch, name, tokens))]


def times_of(folder: Path, *asked: Any) -> list[float]:
    """Return ``times`` of the package in ``folder``.

    Raises:
        RunError: they could not be counted.
    """
    command = [sys.executable, "-c", CHILD, str(folder.resolve()), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RunError(f"--against {folder}: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
    return [float(us) for us in json.loads(done.stdout)]


def compare(arch: str, name: str, tokens: Sequence[int], folder: Path) -> list[dict[str, Any]]:
    """Return a row for each launch: microseconds before and after, their ratio, and the most that it may be."""
    earlier, ours = times_of(folder, arch, name, tokens), times(arch, name, tokens)
    return [
        {"label": variant.label, "tokens": rows, "before_us": before, "after_us": after, "ratio": after / before}
        | {"goal": GOALS[arch][variant.weight]}
        for (variant, rows), before, after in zip(points(arch, name, tokens), earlier, ours, strict=True)
    ]


def text(rows: list[dict[str, Any]]) -> str:
    figures = ("before_us", "after_us", "ratio", "goal")
    cells = [[row["label"], row["tokens"], *(f"{row[name]:.2f}" for name in figures)] for row in rows]
    return "\n".join(aligned(["variant", "T", "before us", "after us", "ratio", "at most"], cells))
