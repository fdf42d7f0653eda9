# SPDX-License-Identifier: Apache-2.0
"""Which tile shape a call gets: a small fixed table, never an autotuner at serving time.

The entries follow from the compiled code (registers, LDS, number of programs); nobody has timed them.
Neither torch nor Triton is imported here: the kernel compiles without torch, and `plan` runs without Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_aiter_mla.decided import Span

TUNED_SCHEMA = "tuned"
"""The schema of ``tuning.TunedTiles``. It is here because readers of the record import no torch."""
NO_LIMIT = 1 << 31
INT32_SPAN = 1 << 31  # of bytes or elements: from here on Triton takes 64-bit offsets
LEAST_TOKENS = 16  # of a block, by the matrix instructions


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of one program's work."""

    block_t: int  # tokens of a query tile, a power of two >= 16
    block_l: int  # latent columns of a query tile, a power of two >= 16; a narrower latent narrows it
    num_warps: int  # warps (waves) of every program
    rope_rows: int = 32  # rows of a rope program, of the query or of the cache
    kv_rows: int = 4  # cache rows of a latent program
    mfma: int = 0  # side of the matrix instruction on ROCm, 0 for the compiler's choice; no meaning on CUDA
    blocks: int = 1  # how many times ``block_l`` columns a query tile does, one after another, over the same rows

    @property
    def label(self) -> str:
        """Short name, unique within a table."""
        columns = f"{self.block_l}" if self.blocks == 1 else f"{self.blocks}x{self.block_l}"
        return f"{self.block_t}x{columns}/{self.num_warps}w"

    def columns(self, latent: int) -> tuple[int, int]:
        """``block_l`` and ``blocks`` over a latent of that width."""
        width = min(self.block_l, latent)
        return width, min(self.blocks, latent // width)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tile and the calls it is for: tokens, and rows of the query, up to these; first match.

    Rows are tokens x heads, with the tokens rounded up to the least that a tile takes.
    """

    max_tokens: int
    max_rows: int
    tile: Tile

    def tokens(self, heads: int) -> int:
        """Return up to how many tokens of ``heads`` heads it is for."""
        return min(self.max_tokens, self.max_rows // (LEAST_TOKENS * heads) * LEAST_TOKENS)


# 64 columns of bfloat16 are one 128-byte line of W_UK_T. rope_rows = 32 gives each lane of four 64-lane waves 8 values:
# 16-byte loads, 8-byte fp8 stores; so does kv_rows = 4 of a 512-wide latent. mfma = 32 would give four waves two tiles.
_SKINNY = Tile(16, 64, 4)
_SHORT = Entry(32, NO_LIMIT, Tile(32, 64, 4, mfma=16))
_PLAIN = Tile(64, 64, 4)
# An MI300X has 304 compute units, an MI355X 256. The query tile doubles with the rows and is as large as leaves 256
# programs: the larger it is, the fewer quantise the same rows of q, which is most of their arithmetic, and read the
# same weight. Where there are few tokens of many heads, a block has no more rows than that.
_AMD_LOW, _AMD_MIDDLE = Tile(16, 128, 4), Tile(32, 128, 8, mfma=16)
_AMD = (
    Entry(NO_LIMIT, 512, _SKINNY),
    Entry(16, NO_LIMIT, _AMD_LOW),
    Entry(NO_LIMIT, 1024, _AMD_LOW),
    Entry(32, NO_LIMIT, _AMD_MIDDLE),
    Entry(NO_LIMIT, 2048, _AMD_MIDDLE),
    Entry(NO_LIMIT, 4096, Tile(64, 128, 4, mfma=16)),
    Entry(NO_LIMIT, NO_LIMIT, Tile(64, 128, 4, blocks=2)),
)

# Any other GPU that Triton compiles for: the shapes with the smallest demands.
FALLBACK = (Entry(16, NO_LIMIT, _SKINNY), _SHORT, Entry(NO_LIMIT, NO_LIMIT, _PLAIN))
TABLE: dict[str, tuple[Entry, ...]] = {
    "gfx942": _AMD,
    "gfx950": _AMD,
    # With programs enough, q is read 4 times instead of 8, W_UK_T once per 128 tokens. 128 x 128 keeps two blocks of 8
    # warps on a multiprocessor; 128 x 256 (178 registers) would leave one.
    "sm90": (
        *FALLBACK[:2],
        Entry(64, NO_LIMIT, _PLAIN),
        Entry(NO_LIMIT, 4096, _PLAIN),
        Entry(NO_LIMIT, 16384, Tile(64, 128, 4)),
        Entry(NO_LIMIT, NO_LIMIT, Tile(128, 128, 8, rope_rows=64, kv_rows=8)),
    ),
}
# Tried by tuning beside the table's: what AMD's own tuned files take for the same BMM, and neighbours of the table's.
MORE = (
    Tile(16, 128, 8), Tile(32, 64, 4, mfma=16), Tile(32, 128, 4, mfma=16), Tile(32, 256, 8, mfma=16), Tile(64, 64, 4),
    Tile(64, 128, 8, mfma=16),
)  # fmt: skip
# Width of the reduction block: DeepSeek's whole nope width, so that all loads of a tile are under way at once. It is
# also the group in which AITER's fp8 GEMM quantises a query row (``absorb.FP8_GROUP``): each block has one scale a row.
BLOCK_K = 128
# The one card whose matrix instructions scale mxfp4 as they multiply; vLLM and AITER have such weights only there.
MXFP4_ARCH = "gfx950"
# The compiler's default differs between Triton's releases. Products of two bfloat16 or two float16 values are exact in
# float32, so a fused multiply-add changes no byte of the rotation. It is pinned to off.
FP_FUSION = False


def tile_for(arch: str, tokens: int, heads: int) -> Tile:
    """Return the tile of ``arch`` for ``tokens`` and ``heads``, by its first entry that covers them.

    Cards without a table get the fallback's.
    """
    return next(entry.tile for entry in TABLE.get(arch, FALLBACK) if tokens <= entry.tokens(heads))


def allowed(arch: str) -> dict[str, Tile]:
    """Return, by label, the tiles that tuning tries on a card; its file may name no others."""
    return {tile.label: tile for tile in (*MORE, *(entry.tile for entry in TABLE.get(arch, FALLBACK)))}


def tried_counts(arch: str, heads: int, chosen: Sequence[Span] = ()) -> tuple[int, ...]:
    """Return one token count for each tile of ``arch``: the fullest it takes, or one row more than its block holds.

    ``chosen`` names the tiles that run instead of the table's.
    """
    spans = [(span.first, span.last, allowed(arch)[span.kernel]) for span in chosen]
    for entry in TABLE.get(arch, FALLBACK):
        first = spans[-1][1] + 1 if spans else 1
        if first <= (last := entry.tokens(heads)):
            spans.append((first, last, entry.tile))
    found = {tile: min(last, max(first, tile.block_t + 1)) for first, last, tile in spans}
    return tuple(found.values())
