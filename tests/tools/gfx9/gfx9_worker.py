"""A process for one architecture: compiles, runs launches and planted bugs, prints one JSON object.

Apart from the tests' process, which may interpret kernels, and one for each architecture (see tools/aot.py).
"""

import json
import re
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.tools.gfx9.gfx9_planted import (
    ADDED,
    OP_SEL_HI,
    OTHER_WORD,
    PLANTED,
    SCALED,
    SUBTRACTED,
    WAIT,
    WORD,
    each,
    not_saturated,
    unmoved,
)
from tools import aot
from tools.gfx9 import matrix
from tools.gfx9.cases import Case, Compiled, record
from tools.gfx9.code import assemble, load
from tools.gfx9.parse import Fault, Skipped
from vllm_aiter_mla.kernels.triton.tiles import Tile

HEADS = 2
SKINNY, LOW, MIDDLE = Tile(16, 64, 4), Tile(16, 128, 4), Tile(32, 128, 8, mfma=16)
WIDE, TWICE = Tile(64, 128, 4, mfma=16), Tile(64, 128, 4, blocks=2)
# Their row maxima take every kind of move between lanes: within rows of 16 lanes, and from one row to another.
REDUCED = (
    aot.Variant(SKINNY, 1, weight_major="P", weight="fp8"),
    aot.Variant(MIDDLE, 1, weight_major="P", weight="fp8", quantised=False),
    aot.Variant(Tile(16, 128, 8), 1, weight_major="P", weight="fp8"),
)
# Over mxfp4 weights also shapes of both matrix instructions, 16 x 16 and 32 x 32, whose lanes differ.
SHORT, BROAD = Tile(32, 64, 4, mfma=16), Tile(64, 128, 4)


def cases() -> list[Case]:
    """Every tile, pairing, type, weight layout, pointer width and block size once, at few rows and heads."""

    def case(tile: Tile, tokens: int, **changes: Any) -> Case:
        return Case(aot.Variant(tile, HEADS, **changes), tokens)

    return [
        case(SKINNY, 3, block_size=16), case(SKINNY, 17, is_neox=True, block_size=1, pointer_hint=False),
        case(LOW, 17, weight_major="P", weight="fp8", pointer_hint=False),
        case(MIDDLE, 16, weight_major="P", pointer_hint=False), case(WIDE, 17, quantised=False),
        case(WIDE, 65, is_neox=True), case(TWICE, 17, weight_major="P", weight="fp8"),
    ]  # fmt: skip


def outcome(compiled: Compiled, case: Case, text: str) -> str:
    try:
        different, _ = compiled.planted(text).run(case)
    except Fault as error:
        return f"fault: {error}"
    except Skipped as error:
        return f"not modelled: {error}"
    return f"{different} bytes" if different else "not caught"


def moves(target: aot.Target, variant: aot.Variant) -> dict[str, Any]:
    """A launch of full tiles of one head; ``moves`` has (line, what shows it) of each move between lanes left out."""
    compiled, case = Compiled(target, variant), Case(variant, variant.tile.block_t, (0,))
    lines, found = compiled.assembly.split("\n"), []
    for i in compiled.program.instructions:
        if other := unmoved(i):
            wrong = [*lines[: i.line - 1], other, *lines[i.line :]]
            found.append((i.text, outcome(compiled, case, "\n".join(wrong))))
    return record(compiled, case) | {"moves": found}


def scaled(target: aot.Target, answer: dict[str, Any]) -> None:
    """Over mxfp4 weights, by the matrix instruction of 16 x 16 and of 32 x 32."""
    short = Case(aot.Variant(SHORT, 1, weight="mxfp4", weight_major="P"), 17)
    wide = Case(aot.Variant(BROAD, 1, weight="mxfp4", weight_major="P"), 33)
    for case in (short, wide):
        made = aot.compile_variant(target, case.variant)
        layouts = re.findall(r"#linear\d? = .* lane = (\[\[.*?\]\])", made.asm["ttgir"])
        answer["scale_layouts"].append([json.loads(layout) for layout in layouts])
        compiled = Compiled(target, case.variant)
        answer["launches"].append(record(compiled, case))
        bugs = SCALED if case is short else {"op_sel_hi of a scale": OP_SEL_HI}
        answer["planted"] |= {name: outcome(compiled, case, plant(compiled.assembly)) for name, plant in bugs.items()}
    own = matrix.scale
    matrix.scale = lambda register, byte: lambda w: np.roll(own(register, byte)(w), 32)
    answer["planted"]["scales of other lanes"] = outcome(compiled, case, compiled.assembly)


def every_move(arch: str) -> list[dict[str, Any]]:
    """``moves`` of every tile over every format of codes."""
    target = aot.TARGETS[arch]
    found = {replace(v, heads=HEADS, pointer_hint=False) for v in aot.variants(target) if v.weight != "plain"}
    return [moves(target, variant) for variant in sorted(found, key=lambda v: v.label)]


def main(arch: str) -> dict[str, Any]:
    target = aot.TARGETS[arch]
    answer: dict[str, Any] = {"launches": [], "planted": {}, "roundings": [], "scale_layouts": []}
    answer |= {"overflow": [], "not_saturated": []}
    answer["reduced"] = [moves(target, variant) for variant in REDUCED]
    for case in cases():
        answer["launches"].append(record(Compiled(target, case.variant), case))
    case = Case(aot.Variant(SKINNY, 1, is_neox=True, block_size=1), 3)
    compiled = Compiled(target, case.variant)
    text = compiled.assembly
    answer["without_preload"] = compiled.run(case, preload=False)[0]
    answer["planted"] |= {name: outcome(compiled, case, plant(text)) for name, plant in PLANTED.items()}
    if arch == "gfx942":
        answer["waits"] = [outcome(compiled, case, wrong) for wrong in each(WAIT, "", text)]
        for quantised, plant in ((False, (WORD, OTHER_WORD)), (True, (SUBTRACTED, ADDED))):
            case = Case(aot.Variant(SKINNY, 1, quantised=quantised), 16, ties=not quantised)
            compiled = Compiled(target, case.variant)
            answer["launches"].append(record(compiled, case))
            answer["roundings"].append([outcome(compiled, case, wrong) for wrong in each(*plant, compiled.assembly)])
    for is_neox in (False, True):
        case = Case(aot.Variant(SKINNY, 1, is_neox=is_neox), 3, overflow=True)
        compiled = Compiled(target, case.variant)
        answer["overflow"].append(compiled.run(case)[0])
        answer["not_saturated"].append(outcome(compiled, case, not_saturated(compiled.assembly)))
    other = assemble(PLANTED["swapped MFMA operands"](text), arch)
    try:
        load(text, arch, other)
    except Skipped as error:
        answer["other_code_object"] = str(error)
    if arch == "gfx950":
        scaled(target, answer)
    return answer


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps((every_move if "--every-move" in sys.argv else main)(sys.argv[1])))
