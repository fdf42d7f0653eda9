"""What a launch costs a card, counted in the executed code: round trips, instructions, bytes by die, programs.

One workgroup of each kind runs whole. Of the other query tiles one wave runs to its first loads of q and of the weight:
those say where in memory the tile lies, and which tiles one die has shows what its L2 fetches.

Counts, no times. The one estimate is labelled as such.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from tools import aot, isa
from tools.common import aligned
from tools.gfx9.cases import Case, Compiled, arguments, minimum_bytes, operands
from tools.gfx9.machine import Counts, launch
from tools.gfx9.memory import Memory
from vllm_aiter_mla.kernels.triton import launcher, tiles

KINDS = ("query tile", "query rope", "KV rope", "KV latent")
# Workgroups go to the dies in turn; each die has an L2, which asks memory for 64 bytes at a time.
DIES, GRANULE = 8, 64
VECTOR = re.compile(r"v_(?!mfma)")
VALU_CYCLES = 4  # of one instruction over 64 lanes, on a SIMD of 16
# By the data sheets of MI300X and MI355X: compute units, peak clock in GHz, peak bandwidth in bytes a microsecond.
CARDS = {"gfx942": (304, 2.1, 5.3e6), "gfx950": (256, 2.4, 8.0e6)}
# Tokens and heads of the table: DeepSeek-V3 on 8 cards and on one, Kimi-K2 on 8 (8 heads).
POINTS = ((1, 16), (16, 16), (32, 16), (64, 8), (64, 16), (512, 16), (512, 128))
# The estimate. Published for MI355X: 3.2 us for such an op at T = 1, two trips; 0.35 us or more for a load that misses;
# 80 % of the peak bandwidth is reached.
FLOOR_US, FLOOR_TRIPS, TRIP_US, REACHED = 3.2, 2, 0.4, 0.8

# The bounds. Trips of every kind, one less of a query tile that has few tokens: such launches are nothing but trips. Of
# the others, by tokens and heads, over fp8 weights.
FEW_TOKENS = 64
TRIPS = dict(zip(KINDS, (2, 2, 2, 1), strict=True))
BOUNDS: dict[tuple[str, str], dict[tuple[int, int], float]] = {
    ("", "bytes"): {(64, 16): 1.1, (512, 128): 1.3},
    ("gfx942", "instructions"): {(64, 16): 500},
    ("gfx942", "vector_us"): {(512, 128): 15.0},
}


@dataclass(frozen=True, slots=True)
class Program:
    """One kind of program."""

    programs: int  # workgroups of the launch
    trips: int  # loads from memory that a wave waits for one after another, up to its last store
    argument_trips: int  # the same of kernel arguments
    instructions: int  # that a wave issues
    vector: int  # of these, those of the vector unit


@dataclass(frozen=True, slots=True)
class Cost:
    """A launch."""

    label: str  # of the variant
    tokens: int  # T
    heads: int  # N
    kinds: dict[str, Program]  # by name
    static: isa.Figures  # registers, LDS, occupancy
    vector_us: float  # least time of the vector instructions if all SIMDs share them evenly, at peak clock
    needed: int  # bytes that the launch has to move
    by_die: int  # bytes that all dies move
    estimate_us: float  # no count: see FLOOR_US

    @property
    def ratio(self) -> float:
        """Bytes that the dies move, of those that have to be moved."""
        return self.by_die / self.needed


class Placed(Exception):  # noqa: N818
    """A wave has loaded from all buffers that it was followed for."""


class Trace(Memory):
    """Notes the ends of every lane's loads by buffer; raises ``Placed`` once each buffer of ``until`` was loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.until: set[str] = set()
        self.ends: dict[str, list[np.ndarray]] = {}

    def load(self, addresses: np.ndarray, words: int, size: int = 4) -> np.ndarray:
        """See the base class."""
        found = super().load(addresses, words, size)
        name = self.find(int(addresses[0]), int(addresses[0])).name
        self.ends.setdefault(name, []).extend((addresses, addresses + (words * size - 1)))
        if self.until and self.until <= self.ends.keys():
            raise Placed
        return found

    def follow(self, *until: str) -> None:
        """Forget what was noted."""
        self.ends, self.until = {}, set(until)

    def starts(self) -> dict[str, int]:
        """By buffer, the lowest address of the first load from it."""
        return {name: int(ends[0].min()) for name, ends in self.ends.items()}


class Counted:
    """One variant over one number of rows, ready to run workgroups of."""

    def __init__(self, compiled: Compiled, tokens: int) -> None:
        self.compiled, self.case = compiled, Case(compiled.variant, tokens)
        inputs, _ = operands(compiled.target, self.case)
        self.memory = Trace()
        self.kernarg = arguments(compiled, self.memory, inputs, inputs.new_query())
        self.needed = minimum_bytes(inputs, self.case)
        slots, tile = inputs.slot_mapping.shape[0], compiled.variant.tile
        self.programs = launcher.programs(tokens, compiled.variant.heads, slots, aot.LATENT, tile)

    def run(self, group: int, waves: int) -> Counts:
        """Execute one workgroup."""
        return launch(self.compiled.program, self.memory, self.kernarg, [group], waves, self.compiled.lds_bytes)

    def kinds(self) -> dict[str, Program]:
        """Execute the first workgroup of each kind."""
        found, first = {}, 0
        for name, programs in zip(KINDS, self.programs, strict=True):
            done = self.run(first, self.compiled.variant.tile.num_warps)
            vector = sum(count for op, count in done.instructions.items() if VECTOR.match(op))
            found[name] = Program(programs, *done.trips, done.instructions.total() // done.waves, vector // done.waves)
            first += programs
        return found

    def bytes_by_die(self) -> int:
        """Bytes that all dies fetch and store: eight times those of the first die's query tiles, and the rest.

        The other programs share the table, slots and positions alone: each die may fetch these once.
        """
        followed = ("q", "w", *(["w_scale"] if self.compiled.variant.weight == "mxfp4" else []))
        self.memory.follow()
        self.run(0, self.compiled.variant.tile.num_warps)
        whole = {name: np.unique(np.concatenate(self.memory.ends[name])) for name in followed}
        start = self.memory.starts()
        touched: dict[str, list[np.ndarray]] = {name: [] for name in followed}
        for group in range(0, self.programs[0], DIES):
            self.memory.follow(*followed)
            with suppress(Placed):
                self.run(group, 1)
            for name, granules in touched.items():
                granules.append(np.unique((whole[name] + (self.memory.starts()[name] - start[name])) // GRANULE))
        fetched = sum(len(np.unique(np.concatenate(granules))) for granules in touched.values())
        rest = sum(self.needed.values()) + (DIES - 1) * sum(self.needed[name] for name in ("cos_sin", "slot", "pos"))
        nope = 2 * self.case.tokens * self.case.variant.heads * aot.NOPE
        return DIES * GRANULE * fetched + rest - nope - self.needed["w"] - self.needed["w_scale"]


def cost(compiled: Compiled, tokens: int) -> Cost:
    """Count one launch of ``compiled`` over ``tokens`` rows."""
    variant, target = compiled.variant, compiled.target
    counted = Counted(compiled, tokens)
    kinds = counted.kinds()
    units, clock, bandwidth = CARDS[target.name]
    issued = sum(kind.programs * kind.vector for kind in kinds.values()) * variant.tile.num_warps
    vector_us = issued * VALU_CYCLES / (units * isa.GFX9_SIMDS) / clock / 1e3
    by_die = counted.bytes_by_die()
    trips = max(kind.trips for kind in kinds.values())
    busy_us = max(vector_us, by_die / bandwidth / REACHED)
    return Cost(
        label=variant.label,
        tokens=tokens,
        heads=variant.heads,
        kinds=kinds,
        static=isa.amdgcn_figures(compiled.assembly, target.name, compiled.lds_bytes, variant.tile.num_warps),
        vector_us=vector_us,
        needed=sum(counted.needed.values()),
        by_die=by_die,
        estimate_us=FLOOR_US + TRIP_US * (trips - FLOOR_TRIPS) + busy_us,
    )


def points(arch: str) -> list[tuple[aot.Variant, int]]:
    """What ``--cost`` counts: fp8 weights at every point, the other formats at T = 64, N = 16."""

    def variant(tokens: int, heads: int, weight: str) -> tuple[aot.Variant, int]:
        tile = tiles.entry_for(arch, tokens, heads).tile
        return aot.Variant(tile, heads, weight_major="P", weight=weight), tokens

    formats = ("plain", "mxfp4") if arch == tiles.MXFP4_ARCH else ("plain",)
    return [variant(*point, "fp8") for point in POINTS] + [variant(64, 16, weight) for weight in formats]


def text(arch: str, costs: list[Cost]) -> str:
    """The table, and under it the bounds that are broken."""
    head = ["variant", "T", "trips (arguments)", "instr (VALU) a wave", "programs", "on CUs", "waves", "regs", "LDS"]
    head += ["VALU us", "bytes by die", "estimate us"]
    rows = []
    for one in costs:
        kinds = one.kinds.values()
        rows.append([
            one.label, one.tokens,
            " ".join(f"{kind.trips}({kind.argument_trips})" for kind in kinds),
            " ".join(f"{kind.instructions}({kind.vector})" for kind in kinds),
            "+".join(str(kind.programs) for kind in kinds),
            CARDS[arch][0], one.static.occupancy, one.static.registers, one.static.lds, f"{one.vector_us:.2f}",
            f"{one.by_die / 1e6:.2f} MB, {one.ratio:.2f}", f"{one.estimate_us:.1f}",
        ])  # fmt: skip
    said = f"{arch}: executed and counted, no time; for each kind of program: {', '.join(KINDS)}"
    broken = [f"BROKEN: {breach}" for breach in breaches(arch, costs)]
    return "\n".join([said, *aligned(head, rows), *broken])


def breaches(arch: str, costs: list[Cost]) -> list[str]:
    """The bounds that are broken, one line each."""
    found = []
    for one in costs:
        where = f"{one.label} T={one.tokens}"
        for name, kind in one.kinds.items():
            most = TRIPS[name] - (name == KINDS[0] and one.tokens <= FEW_TOKENS)
            if kind.trips > most:
                found.append(f"{where}: {kind.trips} dependent trips of a {name} program, at most {most}")
        for what, measured in (("bytes", one.ratio), ("instructions", one.kinds[KINDS[0]].instructions),
                               ("vector_us", one.vector_us)):  # fmt: skip
            bound = BOUNDS.get((arch, what), BOUNDS.get(("", what), {})).get((one.tokens, one.heads))
            if bound is not None and "W-fp8" in one.label and measured > bound:
                found.append(f"{where}: {what} {measured:.2f}, at most {bound}")
    return found
