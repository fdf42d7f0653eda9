"""What serving does to a captured graph, as data: each case names it, and lists the steps that do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vllm_aiter_mla.verify.buffers import ALL
from vllm_aiter_mla.verify.setting import capture_sizes

Kind = Literal["kernel", "full", "piecewise", "compiled"]


@dataclass(frozen=True, slots=True)
class Replay:
    """Replay the graph of ``size`` for a step with ``rows`` real rows (None: all), ``prefill`` of them prefill rows."""

    size: int
    rows: int | None = None
    prefill: int = 0
    fresh: tuple[str, ...] = ALL
    side: bool = False


@dataclass(frozen=True, slots=True)
class Eager:
    """Run a step of ``size`` padded rows without any graph, as vLLM runs a mixed batch or an uncaptured size."""

    size: int
    rows: int | None = None
    prefill: int = 0
    fresh: tuple[str, ...] = ALL


@dataclass(frozen=True, slots=True)
class Soak:
    """Replay the graph of ``size`` very often, compare now and then, and watch the memory."""

    size: int


Step = Replay | Eager | Soak | Literal["weights", "scales", "table", "launches"]
"""A name changes what it names in place; "launches" counts those of every captured graph against what may be."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that serving does.

    Attributes:
        name: as printed, and selected by ``--only``.
        serving: what serving does, in one sentence.
        sizes: the padded sizes to capture.
        steps: what happens then.
        kind: the preparation alone; or the op with what stands before and after it: in one graph, between two graphs,
            or compiled by Inductor.
        layers: layers in a step.
        width: tokens a decode request brings, 1 + drafts.
        missing_slots: by how many the slot mapping is shorter than the padded size.
        shared_pool: whether all graphs of the case share one memory pool.
        side_stream: whether the capture happens on a stream that the caller made.
        quick: whether ``--quick`` and the interpreter run it too.
    """

    name: str
    serving: str
    sizes: tuple[int, ...]
    steps: tuple[Step, ...]
    kind: Kind = "kernel"
    layers: int = 1
    width: int = 1
    missing_slots: int = 0
    shared_pool: bool = False
    side_stream: bool = False
    quick: bool = True

    def slots(self, size: int) -> int | None:
        """S at a padded size, None for as many as rows."""
        return size - self.missing_slots if self.missing_slots else None


def cases(limit: int) -> tuple[Case, ...]:
    """All cases for a decode limit of ``limit`` tokens. Names are unique.

    Raises:
        ValueError: below 8 tokens there is no room for the cases' mixtures.
    """
    if limit < 8:
        raise ValueError(f"a decode limit of at least 8 tokens expected, got {limit}")
    sizes = capture_sizes(limit)
    return (
        *_one_thing_changes(limit),
        *_rows(limit, sizes),
        *(_speculative(limit, width) for width in (2, 4)),
        *_graphs(limit, sizes),
        *_attention(limit),
        Case(
            "compiled-by-inductor", "torch.compile leaves the op out of its graphs and never records a size twice",
            sizes[-2:], (), kind="compiled", quick=False,
        ),
    )  # fmt: skip


def _one_thing_changes(limit: int) -> tuple[Case, ...]:
    start, eager = Replay(limit), Eager(limit // 2)

    def only(what: str) -> tuple[Step, ...]:
        return (start, Replay(limit, fresh=(what,)), Replay(limit, fresh=(what,)))

    def changed(what: Literal["weights", "scales", "table"]) -> tuple[Step, ...]:
        # One eager step after the change: a back end that keeps a copy of the table may renew it then.
        return (start, what, eager, Replay(limit, fresh=()), what, eager, Replay(limit))

    steps = {
        ("fresh-data", "the same requests bring new activations"): only("data"),
        ("other-positions", "requests advance: other positions, the same slots"): only("positions"),
        ("other-slots", "rows move to other slots of the cache"): only("slots"),
        ("weights-replaced", "weights are loaded anew, in place (RLHF, sleep mode)"): changed("weights"),
        ("scales-changed", "the fp8 scales change on the device"): changed("scales"),
        ("table-rewritten", "the cos/sin table is written anew, in place"): changed("table"),
    }
    return tuple(Case(name, serving, (limit,), each) for (name, serving), each in steps.items())


def _speculative(limit: int, width: int) -> Case:
    sizes = capture_sizes(limit, width)
    return Case(
        f"speculative-width-{width}", f"each request brings {width - 1} draft token(s)",
        sizes, (*map(Replay, sizes), Replay(sizes[-1], width)), kind="full", width=width, quick=False,
    )  # fmt: skip


def _rows(limit: int, sizes: tuple[int, ...]) -> tuple[Case, ...]:
    half = limit // 2
    rows = (limit, 1, half, limit - 1, 2, limit)
    return (
        Case(
            "rows-grow-and-shrink",
            "requests come and go under one padded size; padded rows keep stale positions and have slot -1",
            (limit,), (*(Replay(limit, count) for count in rows), Eager(limit, half), Replay(limit, half)),
        ),
        Case(
            "no-real-row", "a data-parallel rank without work replays with padding alone",
            (limit,), (Replay(limit), Replay(limit, 0), Replay(limit)),
        ),
        Case(
            "every-capture-size",
            "each captured size, from 1 to the end of the decode limit, replays full and short of one row", sizes,
            tuple(step for size in sizes for step in (Replay(size), Replay(size, max(size - 1, 1)))),
        ),
        Case(
            "fewer-slots-than-rows", "the slot mapping is shorter than the padded size",
            (limit,), (Replay(limit, limit - 3), Replay(limit, half)), missing_slots=3,
        ),
    )  # fmt: skip


def _graphs(limit: int, sizes: tuple[int, ...]) -> tuple[Case, ...]:
    half, small, few = limit // 2, sizes[1], (sizes[0], sizes[2], limit)
    crossing = (limit, half, small, small, half, limit, limit)
    return (
        Case(
            "shared-pool", "graphs of several sizes share one memory pool and replay in turn",
            (small, half, limit), tuple(Replay(size, max(size - 1, 1)) for size in crossing), shared_pool=True,
        ),
        Case(
            "eager-between-replays", "mixed batches run without a graph between replays of graphs of other sizes", few,
            (
                Replay(limit), Eager(limit, limit, half), Replay(few[1], 2), Eager(half, half, 2), Replay(1),
                Replay(limit),
            ),
            kind="full", shared_pool=True,
        ),
        Case(
            "side-stream", "the capture runs on a stream of the caller's, the replay on another",
            (half, limit), (Replay(limit, side=True), Replay(half, side=True), Replay(limit)), side_stream=True,
        ),
        Case(
            "two-layers-one-graph", "two layers with weights, caches and scales of their own in one graph",
            (half, limit), (Replay(limit), Replay(half, 1), Replay(limit, half)), layers=2,
        ),
        Case("kernel-status", "each layer launches what its back end should, and no more", few, ("launches",)),
        Case(
            "kernel-status-two-layers", "two layers launch twice as much",
            (limit,), ("launches",), layers=2, quick=False,
        ),
        Case("long-run", "one graph replays thousands of times", (limit,), (Replay(limit), Soak(limit))),
    )  # fmt: skip


def _attention(limit: int) -> tuple[Case, ...]:
    half, third = limit // 2, limit // 3
    return (
        Case(
            "full-graph-decode", "the whole op in one graph with what stands around it, for decode batches",
            (half, limit), (Replay(limit), Replay(limit, half), Replay(half, 1), Replay(limit, limit - 1)),
            kind="full", shared_pool=True,
        ),
        Case(
            "piecewise-decode", "the op runs between two graphs and prepares the real rows alone",
            (half, limit), (Replay(limit), Replay(limit, half), Replay(half), Replay(limit, 1)),
            kind="piecewise", shared_pool=True,
        ),
        Case(
            "mixed-batch-piecewise",
            "a short prompt fits a captured size: prefill rows run through the graphs of that size",
            (half, limit),
            (
                Replay(limit), Replay(limit, limit, half), Replay(half, half, half), Replay(limit, limit - 1, third),
                Eager(limit, limit, third), Replay(limit),
            ),
            kind="piecewise",
        ),
        Case(
            "padded-rows-are-poison",
            "rows of a full graph that the back end leaves undefined hold NaN when the decode kernel sees them",
            (limit,), (Replay(limit, half), Replay(limit, limit - 1), Replay(limit, 1)), kind="full",
        ),
        Case(
            "two-layers-piecewise", "a layer's output goes on to the next layer's graph",
            (limit,), (Replay(limit), Replay(limit, half), Replay(limit, limit, third)),
            kind="piecewise", layers=2, quick=False,
        ),
        Case(
            "long-run-piecewise", "graphs and the op between them run thousands of times",
            (half,), (Replay(half), Soak(half)), kind="piecewise",
        ),
    )  # fmt: skip
