"""What a launch costs a card, counted in the executed code: round trips, requests, instructions, bytes, programs.

One workgroup of each kind runs whole. Of the other query tiles one wave runs to its first loads of q and of the weight:
those say where in memory the tile lies, and which tiles one die has shows what its L2 fetches.

Counts, no times.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import triton

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
# By the data sheets of MI300X and MI355X: compute units, peak clock in GHz.
CARDS = {"gfx942": (304, 2.1), "gfx950": (256, 2.4)}
# Tokens and heads of the table: DeepSeek-V3 on 8 cards (16), 4 and one, Kimi-K2 on 8 (8 heads).
TOKENS, HEADS = (1, 16, 32, 64, 128, 256, 512), (8, 16, 32, 128)
# The operands that a program moves by whole rows. The others are single elements: slots, positions, scales.
BY_ROWS = ("q", "w", "k_pe", "kv_c", "cos_sin", "out", "cache")

# The bounds: the most trips of every kind; a second one of a query tile over mxfp4, whose scales the compiler may load
# late where a lane has one byte of them.
TRIPS = dict(zip(KINDS, (1, 2, 2, 1), strict=True))
# The least bytes of a request. NeoX stores the halves of a rotated row apart.
LOAD_WIDTH, STORE_WIDTH, NEOX_STORE_WIDTH = GRANULE, GRANULE, GRANULE // 2
# Over fp8 weights, by the rows of a launch (tokens x heads): the most instructions of a wave of a query tile. Whatever
# the table says, a launch of few rows must not wait for long programs, nor one of many be cut into small ones.
PATHS = ((2048, 380), (4096, 850), (1 << 31, 1250))
# The most query tiles: two for each unit of the smaller card, or as few as blocks of 64 tokens and 256 columns leave.
# Up to 16 tokens a tile has no more rows to take.
FEW_TOKENS, MOST_TILES, LARGEST = 16, 512, 32
# By tokens and heads.
BYTES = {(64, 16): 1.1, (512, 128): 1.3}
RELEASE = tuple(map(int, triton.__version__.split(".")[:2]))
# On gfx942 one more instruction a value goes beyond them. 3.7.1 and 3.8.0 make one instruction of a clamp, as 3.9.0
# does, and 3.6.0 four: findings/triton-clamp-by-release.sh. 3.7.1 makes more instructions of the rest.
GFX942_US = {(3, 6): {"fp8": 15.0}, (3, 7): {"plain": 9.1, "fp8": 13.8}, (3, 8): {"plain": 7.4, "fp8": 10.9}}
"""By the release of Triton from which on they hold."""
# By card and format of the weight, at 512 tokens and 128 heads.
VECTOR_US = {
    "gfx942": GFX942_US[max((release for release in GFX942_US if release <= RELEASE), default=(3, 6))],
    "gfx950": {"fp8": 15.0},
}
VECTOR_POINT = (512, 128)


@dataclass(frozen=True, slots=True)
class Moved:
    """What the vector instructions of a program load, or store, of the operands in ``BY_ROWS``."""

    requests: int  # segments of 64 bytes, each counted once for every instruction that touches it
    moved: int  # bytes, counted the same way

    @property
    def width(self) -> float:
        """Bytes of a segment that one request moves, on average; 0 without a request."""
        return self.moved / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class Program:
    """One kind of program."""

    programs: int  # workgroups of the launch
    trips: int  # loads from memory that a wave waits for one after another, up to its last store
    argument_trips: int  # the same of kernel arguments
    instructions: int  # that a wave issues
    vector: int  # of these, those of the vector unit
    loads: Moved  # of one program
    stores: Moved


@dataclass(frozen=True, slots=True)
class Cost:
    """A launch."""

    label: str  # of the variant
    weight: str  # its format
    neox: bool  # its pairing
    tokens: int  # T
    heads: int  # N
    kinds: dict[str, Program]  # by name
    static: isa.Figures  # registers, LDS, occupancy
    vector_us: float  # least time of the busiest SIMD's vector instructions, at peak clock
    needed: int  # bytes that the launch has to move
    by_die: int  # bytes that all dies move

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
        self.moved = {"load": Counter[str](), "store": Counter[str]()}

    def store(self, addresses: np.ndarray, values: np.ndarray, size: int = 4) -> None:
        """See the base class."""
        super().store(addresses, values, size)
        self._note("store", addresses, values.shape[1] * size)

    def load(self, addresses: np.ndarray, words: int, size: int = 4) -> np.ndarray:
        """See the base class."""
        found = super().load(addresses, words, size)
        name = self._note("load", addresses, words * size)
        self.ends.setdefault(name, []).extend((addresses, addresses + (words * size - 1)))
        if self.until and self.until <= self.ends.keys():
            raise Placed
        return found

    def _note(self, verb: str, addresses: np.ndarray, width: int) -> str:
        """Count what one instruction moves of ``width`` bytes a lane; return the buffer's name."""
        name = self.find(int(addresses[0]), int(addresses[0])).name
        if name in BY_ROWS:
            touched = np.unique(addresses[:, None] + np.arange(width))
            self.moved[verb] += Counter(requests=len(np.unique(touched // GRANULE)), moved=len(touched))
        return name

    def follow(self, *until: str) -> None:
        """Forget what was noted."""
        self.ends, self.until = {}, set(until)
        self.moved = {verb: Counter() for verb in self.moved}

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
        self.programs = launcher.programs(tokens, compiled.variant.heads, aot.LATENT, compiled.variant.tile)

    def run(self, group: int, waves: int) -> Counts:
        """Execute one workgroup."""
        return launch(self.compiled.program, self.memory, self.kernarg, [group], waves, self.compiled.lds_bytes)

    def kinds(self) -> dict[str, Program]:
        """Execute the first workgroup of each kind."""
        found, first = {}, 0
        for name, programs in zip(KINDS, self.programs, strict=True):
            self.memory.follow()
            done = self.run(first, self.compiled.variant.tile.num_warps)
            vector = sum(count for op, count in done.instructions.items() if VECTOR.match(op))
            each = done.instructions.total() // done.waves, vector // done.waves
            loads, stores = (Moved(moved["requests"], moved["moved"]) for moved in self.memory.moved.values())
            found[name] = Program(programs, *done.trips, *each, loads, stores)
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
                self.run(group, self.compiled.variant.tile.num_warps)
            for name, granules in touched.items():
                granules.append(np.unique((whole[name] + (self.memory.starts()[name] - start[name])) // GRANULE))
        fetched = sum(len(np.unique(np.concatenate(granules))) for granules in touched.values())
        rest = sum(self.needed.values()) + (DIES - 1) * sum(self.needed[name] for name in ("cos_sin", "slot", "pos"))
        nope = 2 * self.case.tokens * self.case.variant.heads * aot.NOPE
        return DIES * GRANULE * fetched + rest - nope - self.needed["w"] - self.needed["w_scale"]


def cost(compiled: Compiled, tokens: int) -> Cost:
    variant, target = compiled.variant, compiled.target
    counted = Counted(compiled, tokens)
    kinds = counted.kinds()
    units, clock = CARDS[target.name]
    # Programs go to the units in turn.
    work = np.concatenate([np.full(kind.programs, kind.vector) for kind in kinds.values()])
    busiest = max(work[unit::units].sum() for unit in range(min(units, len(work))))
    return Cost(
        label=variant.label,
        weight=variant.weight,
        neox=variant.is_neox,
        tokens=tokens,
        heads=variant.heads,
        kinds=kinds,
        static=isa.amdgcn_figures(compiled.assembly, target.name, compiled.lds_bytes, variant.tile.num_warps),
        vector_us=float(busiest) * variant.tile.num_warps / isa.GFX9_SIMDS * VALU_CYCLES / clock / 1e3,
        needed=sum(counted.needed.values()),
        by_die=counted.bytes_by_die(),
    )


def points(arch: str) -> list[tuple[aot.Variant, int]]:
    """What ``--cost`` counts, each with a cache below 2 GiB and with a larger one.

    fp8 weights at every point; the other formats, and the other pairing, at T = 64 and N = 16; those also at T = 512
    and N = 128.
    """

    def variants(tokens: int, heads: int, **more: Any) -> list[tuple[aot.Variant, int]]:
        variant = aot.Variant(tiles.tile_for(arch, tokens, heads), heads, weight_major="P", **more)
        return [(replace(variant, pointer_hint=hint), tokens) for hint in aot.hints(aot.TARGETS[arch])]

    formats = ("plain", "mxfp4") if arch == tiles.MXFP4_ARCH else ("plain",)
    grid = [variants(tokens, heads, weight="fp8") for heads in HEADS for tokens in TOKENS]
    others = [variants(*point, weight=weight) for weight in formats for point in ((64, 16), (512, 128))]
    return [one for group in (*grid, *others, variants(64, 16, weight="fp8", is_neox=True)) for one in group]


def count(target: aot.Target, chosen: Sequence[tuple[aot.Variant, int]]) -> list[Cost]:
    """Compile each variant once, and count its launches over the rows of ``chosen``."""
    compiled = cache(partial(Compiled, target))
    return [cost(compiled(variant), tokens) for variant, tokens in chosen]


def text(arch: str, costs: list[Cost]) -> str:
    """The table, and under it the bounds that are broken."""
    head = ["variant", "T", "trips (arguments)", "instr (VALU) a wave", "programs", "on CUs", "waves", "regs", "LDS"]
    head += ["VALU us", "bytes by die", "loads (bytes each)", "stores (bytes each)"]
    rows = []
    for one in costs:
        kinds = one.kinds.values()
        rows.append([
            one.label, one.tokens,
            " ".join(f"{kind.trips}({kind.argument_trips})" for kind in kinds),
            " ".join(f"{kind.instructions}({kind.vector})" for kind in kinds),
            "+".join(str(kind.programs) for kind in kinds),
            CARDS[arch][0], one.static.occupancy, one.static.registers, one.static.lds, f"{one.vector_us:.2f}",
            f"{one.by_die / 1e6:.2f} MB, {one.ratio:.2f}",
            " ".join(f"{kind.loads.requests}({kind.loads.width:.0f})" for kind in kinds),
            " ".join(f"{kind.stores.requests}({kind.stores.width:.0f})" for kind in kinds),
        ])  # fmt: skip
    said = f"{arch}: executed and counted, no time; for each kind of program: {', '.join(KINDS)}"
    broken = [f"BROKEN: {breach}" for breach in breaches(arch, costs)]
    return "\n".join([said, *aligned(head, rows), *broken])


def breaches(arch: str, costs: list[Cost]) -> list[str]:
    return [f"{one.label} T={one.tokens}: {what}" for one in costs for what in (*_slow(one), *_large(arch, one))]


def _slow(one: Cost) -> Iterator[str]:
    for name, kind in one.kinds.items():
        most = TRIPS[name] + (name == KINDS[0] and one.weight == "mxfp4")
        if kind.trips > most:
            yield f"{kind.trips} dependent trips of a {name} program, at most {most}"
        stores = NEOX_STORE_WIDTH if one.neox and "rope" in name else STORE_WIDTH
        for verb, moved, least in (("load", kind.loads, LOAD_WIDTH), ("store", kind.stores, stores)):
            if moved.requests and moved.width < least:
                yield f"a {verb} request of a {name} program moves {moved.width:.1f} bytes, at least {least}"


def _large(arch: str, one: Cost) -> Iterator[str]:
    """Vector instructions of a launch; over fp8 weights also its bytes, and its query tiles and their instructions."""
    point = (one.tokens, one.heads)
    most_us = VECTOR_US[arch].get(one.weight) if point == VECTOR_POINT else None
    if most_us is not None and one.vector_us > most_us:
        yield f"{one.vector_us:.4g} us of vector instructions, at most {most_us}"
    if one.weight != "fp8":
        return
    path = next(path for rows, path in PATHS if one.tokens <= FEW_TOKENS or one.tokens * one.heads <= rows)
    measured = [("bytes moved for each needed", one.ratio, BYTES.get(point))]
    measured += [("instructions of a query tile", one.kinds[KINDS[0]].instructions, path)]
    if one.tokens > FEW_TOKENS:
        most = max(MOST_TILES, one.tokens * one.heads // LARGEST)
        measured += [("query tiles", one.kinds[KINDS[0]].programs, most)]
    for what, found, bound in measured:
        if bound is not None and found > bound:
            yield f"{found:.4g} {what}, at most {bound}"
