# SPDX-License-Identifier: Apache-2.0
"""What a run consists of, as data: sizes, dtypes, and the steps by which each case does what serving does."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from vllm_aiter_mla.kernels import formats
from vllm_aiter_mla.kernels.absorb import P_MAJOR

ACT = torch.bfloat16
"""The activation dtype of a run, if no model has another one."""
FRESH = ("data", "positions", "slots")
"""What a step may change."""
# The cases need eight tokens. 8,192 is vLLM's default on MI300X with seven drafts: 1,024 requests of eight tokens.
LIMITS = (8, 8192)


@dataclass(frozen=True, slots=True)
class Geometry:
    """One MLA layer as a rank sees it."""

    heads: int  # query heads
    nope: int  # un-rotated width of a query head
    rope: int  # rotated width
    latent: int  # ``kv_lora_rank``
    v: int  # width of a value head
    block_size: int  # of the KV cache
    blocks: int  # blocks that a request may hold
    max_position: int  # rows of the rotary table; a prime, so that no other buffer has as many
    out_heads: int = 0  # heads that the decode kernel reads, as in ``DecodeInputs``; 0 for ``heads``


# The Triton back end takes widths that are powers of two from 16 on.
SMALL = Geometry(heads=2, nope=32, rope=16, latent=32, v=16, block_size=8, blocks=3, max_position=509)
# DeepSeek's widths at 16 heads a rank (128 heads on 8 ranks).
REAL = Geometry(heads=16, nope=128, rope=64, latent=512, v=128, block_size=64, blocks=3, max_position=4099)
# DeepSeek's widths, which AITER's kernels want, and otherwise as little as the cases need: an emulator runs a card's
# code thousands of times slower than the card.
TINY = replace(REAL, heads=2, block_size=16, max_position=509)


@dataclass(frozen=True, slots=True)
class Variant:
    """Dtypes and rotary style of a run."""

    name: str  # printed, and selected by --variant
    cache: torch.dtype
    out: torch.dtype  # of the prepared query
    is_neox: bool = False
    weight: tuple[Any, ...] = ("plain",)  # format of the absorb weight, as ``AbsorbWeight.key`` names it
    act: torch.dtype = ACT  # activation dtype


def variants(on_card: bool, native: torch.dtype, quick: bool, act: torch.dtype = ACT) -> tuple[Variant, ...]:
    """Return the variants of a run with activations of ``act``, bfloat16 or float16.

    fp8 and bf16 are in every run; between them they have both layouts of a plain weight. A full run has an fp8 cache
    with a 16-bit query, and on a CPU both fp8 flavours. vLLM 0.30 to 0.32 hold the absorb weights in fp8 by default on
    AMD cards, so a quick run on a GPU has them too. The names do not depend on ``act``: "bf16" may store float16.
    """
    fp8 = Variant("fp8", native, native, act=act)
    both = (fp8, Variant("bf16", act, act, True, ("plain", P_MAJOR), act))
    weights = replace(fp8, name="fp8-weight", weight=("fp8", native))
    if quick:
        return (*both, weights) if on_card else both
    mixed = replace(fp8, name="fp8-cache", out=act)
    if on_card:
        return (*both, weights, mixed)
    other = next(dtype for dtype in formats.FLAVOURS if dtype != native)
    return (*both, weights, mixed, Variant("fp8-other", other, other, is_neox=True, act=act))


def capture_sizes(limit: int) -> tuple[int, ...]:
    """Return the sizes up to ``limit`` tokens that vLLM captures in its modes "balanced" and "interactivity".

    The list is that of ``VllmConfig._set_cudagraph_sizes``; ``tests/plan`` compares it with the installed vLLM's.
    """
    sizes = (*range(1, 33), *range(40, 256, 8), *range(256, 513, 16))
    return tuple(size for size in sizes if size <= limit)


def chosen_sizes(limit: int, width: int = 1) -> tuple[int, ...]:
    """Return half of ``limit``, half of that and so on, each made odd, and the last two sizes, in tokens.

    Of a power of two it is 1, 3, 5, 9, 17, ...: one row more than a kernel's tile holds. With ``width`` tokens per
    request the sizes count whole requests.
    """
    requests = limit // width
    sizes = {requests >> i | 1 for i in range(1, requests.bit_length() + 1)} | {max(requests - 1, 1), requests}
    return tuple(size * width for size in sorted(sizes))


@dataclass(frozen=True, slots=True)
class Replay:
    """Replay the graph of ``size`` padded rows for a batch."""

    size: int
    rows: int | None = None  # real rows; None for all
    prefill: int = 0  # how many of them are prefill rows
    fresh: tuple[str, ...] = FRESH  # what changes since the last step
    side: bool = False  # on a stream of its own

    @property
    def real_rows(self) -> int:
        """The number of real rows."""
        return self.size if self.rows is None else self.rows


class Eager(Replay):
    """Run a batch without a graph, as vLLM runs a mixed batch or a size that it has not captured."""


CaseStep = Replay | Literal["weights", "scales", "table", "overflow", "launches", "soak"]
"""A name changes that buffer in place, "overflow" the rows. "launches" compares the captured launches with what the
back end may launch. "soak" replays the only graph very often, compares now and then, and watches the memory."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that serving does.

    The kind says what is captured. "kernel" captures the preparation of the query. "full" captures the whole op with
    what comes before and after it. "piecewise" runs the op between two graphs.
    """

    name: str  # printed, and selected by --only
    serving: str  # what serving does, in one sentence
    sizes: tuple[int, ...]  # padded sizes to capture
    steps: tuple[CaseStep, ...]
    kind: Literal["kernel", "full", "piecewise"] = "kernel"
    layers: int = 1
    width: int = 1  # tokens per decode request, 1 + drafts
    padding: float | None = None  # what padded rows of q, k_pe and kv_c hold; None for what the last steps left
    shared_pool: bool = False  # whether all graphs share one memory pool
    side_stream: bool = False  # whether the capture runs on a stream of its own
    quick: bool = True  # whether --quick runs it too

    @property
    def row_counts(self) -> set[int]:
        """The numbers of rows for which the kernel is called: those of its graphs, and real rows outside of graphs."""
        is_piecewise = self.kind == "piecewise"  # its graphs hold no kernel
        steps = (step for step in self.steps if isinstance(step, Replay) and not step.prefill)
        outside = {step.real_rows for step in steps if is_piecewise or isinstance(step, Eager)}
        return outside if is_piecewise else outside | {*self.sizes}


@dataclass(frozen=True, slots=True)
class Item:
    """One result to come: a case with a variant and a back end, how large it is, and its seed."""

    backend: str  # as ``session.FINDERS`` has it
    case: Case
    variant: Variant
    geometry: Geometry
    limit: int  # the last capture size; the largest batch has one row more
    seed: int = 0  # of the data, together with the names of case and variant
    soak: int = 1000  # replays of a long run
    digest: bool = False  # keep a digest of each output


def cases(limit: int, act: torch.dtype = ACT) -> tuple[Case, ...]:
    """Return all cases for a decode limit of ``limit`` tokens and activations of ``act``. Names are unique.

    Raises:
        ValueError: ``limit`` is outside ``LIMITS``.
    """
    low, high = LIMITS
    if not low <= limit <= high:
        raise ValueError(f"--limit {limit}: between {low} and {high} tokens expected")
    return (*_of_the_kernel(limit), *(_both_ends(limit, drafts) for drafts in (0, 1, 3)), *_of_the_op(limit, act))


def _of_the_kernel(limit: int) -> Iterator[Case]:
    """Yield the cases that capture the preparation of the query."""
    start, half = Replay(limit), limit // 2 | 1
    two, chosen = (half, limit), chosen_sizes(limit)
    every = tuple(sorted({*capture_sizes(limit), *chosen}))

    def only(what: str) -> tuple[CaseStep, ...]:
        return (start, Replay(limit, fresh=(what,)), Replay(limit, fresh=(what,)))

    def overflows(size: int) -> tuple[CaseStep, ...]:
        # The first step draws, because a replay with other rows than the last one does: then they stay as they are.
        return (Replay(size), "overflow", Replay(size, fresh=()))

    def changed(what: Literal["weights", "scales", "table"]) -> tuple[CaseStep, ...]:
        # One eager step after the change: a back end that keeps a copy of the table may renew it then.
        return (start, what, Eager(half), Replay(limit, fresh=()), what, Eager(half), start)

    yield from (
        Case("fresh-data", "the same requests bring new activations", (limit,), only("data")),
        Case("other-positions", "requests advance: other positions, the same slots", (limit,), only("positions")),
        Case("other-slots", "rows move to other slots of the cache", (limit,), only("slots")),
        Case("weights-replaced", "weights are reloaded in place (RLHF, sleep mode)", (limit,), changed("weights")),
        Case("scales-changed", "the fp8 scales change on the device", (limit,), changed("scales")),
        Case("table-rewritten", "the cos/sin table is rewritten in place", (limit,), changed("table")),
        Case(
            "rows-grow-and-shrink",
            "requests come and go under one padded size; padded rows keep stale positions and have slot -1", (limit,),
            (*(Replay(limit, rows) for rows in (limit, 1, half, limit - 1, 2, limit)), Eager(limit, half),
             Replay(limit, half)),
        ),
        Case("no-real-row", "a data-parallel rank without work replays padding only", (limit,),
             (start, Replay(limit, 0), start)),
        Case(
            "every-capture-size", "vLLM captures tens of sizes, and a batch replays the next larger one", every,
            tuple(map(Replay, every)), quick=False,
        ),
        Case(
            "fp8-overflow", "values beyond fp8's range are stored as the largest, or as what the back end says",
            (1, half, limit), (*overflows(limit), *overflows(half), *overflows(1), start),
        ),
        Case(
            "shared-pool", "graphs of several sizes share one memory pool and replay in turn", chosen,
            (*map(Replay, reversed(chosen)), *(Replay(size, max(size - 1, 1)) for size in chosen)), shared_pool=True,
        ),
        Case(
            "side-stream", "the caller captures on one stream of its own and replays on another", two,
            (Replay(limit, side=True), Replay(half, side=True), start), side_stream=True,
        ),
        Case(
            "two-layers-one-graph",
            "two layers with their own weights, caches, tables and scales share one graph; their scales change", two,
            (start, Replay(half, 1), "scales", Replay(limit, half)), layers=2,
        ),
        Case("kernel-status", "each layer launches what its back end should, and no more", (1, 3, limit),
             ("launches",)),
        Case("kernel-status-two-layers", "two layers launch twice as much", (limit,), ("launches",), layers=2,
             quick=False),
        Case("long-run", "one graph replays thousands of times", (limit,), (start, "soak")),
    )  # fmt: skip


def _both_ends(limit: int, drafts: int) -> Case:
    """Return the case of one request and of as many as may decode, with ``drafts`` draft tokens each."""
    width = 1 + drafts
    sizes = chosen_sizes(limit, width)
    steps: list[CaseStep] = [*map(Replay, sizes[1:-1])]
    for end in (sizes[0], sizes[-1]):
        steps += Replay(end), *(Replay(end, fresh=(what,)) for what in FRESH)
        steps += Replay(end, end - width), Replay(end), "weights", Replay(end, fresh=())  # a request leaves
    return Case(
        f"both-ends-{drafts}-drafts", f"one request and as many as may decode bring {drafts} draft token(s) each",
        sizes, tuple(steps), kind="full", width=width, shared_pool=True, quick=not drafts,
    )  # fmt: skip


def _of_the_op(limit: int, act: torch.dtype) -> Iterator[Case]:
    """Yield the cases that capture the whole op, or what comes before and after it."""
    # Rows of an even and of an odd number, because a piece prepares as many as are real.
    start, half, third = Replay(limit), limit // 2 | 1, limit // 3
    two, fewer = (half, limit), (Replay(limit, half), Replay(limit, limit - 1), Replay(limit, 1))
    yield from (
        Case(
            "eager-between-replays", "mixed batches run without a graph between replays of graphs of other sizes",
            (1, 3, limit), (start, Eager(limit, limit, half), Replay(3, 2), Eager(half, half, 2), Replay(1), start),
            kind="full", shared_pool=True,
        ),
        Case(
            "larger-than-captured", "a decode batch larger than every graph runs without one, then graphs replay again",
            two, (start, Eager(limit + 1), start, Replay(half)), kind="full", shared_pool=True,
        ),
        Case(
            "full-graph-decode", "decode batches run the whole op in one graph, with what comes before and after it",
            two, (start, Replay(limit, half), Replay(half, 1), Replay(limit, limit - 1)), kind="full", shared_pool=True,
        ),
        Case(
            "piecewise-decode", "the op runs between two graphs and prepares the real rows only", two,
            (start, Replay(limit, half), Replay(half), Replay(limit, limit - 1), Replay(limit, 1)), kind="piecewise",
            shared_pool=True,
        ),
        Case(
            "mixed-batch-piecewise",
            "a short prompt fits a captured size: prefill rows run through the graphs of that size", two,
            (start, Replay(limit, limit, half), Replay(half, half, half), Replay(limit, limit - 1, third),
             Eager(limit, limit, third), start), kind="piecewise",
        ),
        *(
            Case(
                f"padding-is-{what}", f"padded rows of q, k_pe and kv_c hold {values}: what an earlier layer left",
                (limit,), fewer, kind="full", padding=padding,
            )
            for what, values, padding in (
                ("nan", "NaN", torch.nan), ("huge", "the largest number", torch.finfo(act).max),
            )
        ),
        Case(
            "two-layers-piecewise", "a layer's output goes on to the next layer's graph", (limit,),
            (start, Replay(limit, half), Replay(limit, limit, third)), kind="piecewise", layers=2, quick=False,
        ),
        Case(
            "long-run-piecewise", "graphs and the op between them run thousands of times",
            (half,), (Replay(half), "soak"), kind="piecewise",
        ),
    )  # fmt: skip
