"""Count what one layer launches, allocates and moves in each kind of batch, with the flag off and on.

    python tools/ledger.py

Torch's dispatcher counts the ops of one MLA layer on a CPU, with one launch for each kernel of a GPU. docs/evidence.md
says what is counted, and `make docs` writes the tables. Exit status 1 if flag on is above flag off with the same
options in launches, allocations or bytes of any row, or if our op did not launch what that kind of batch is there to
count.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.common import Parser, guarded, table

SIDES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "off": (("rope",), ("write", "attention")),
    "on": ((), ("ours",)),
    "off, fused": (("rope and write",), ("attention",)),
    "on, fused": ((), ("ours, fused",)),
}
"""The ops of each side: those that a piecewise graph replays with its pieces, and those that Python calls.

Two sides over vLLM's default options, and two with graph partition, which brings vLLM's own RoPE + KV fusion."""
CACHES = ("fp8", "auto")
AITER_OP = "aiter::fused_qk_rope_concat_and_cache_mla"
FUSED = "_C_cache_ops::concat_and_cache_mla_rope_fused"
ROTARY = "_C::rotary_embedding"
OWN_WRITE = "concat_and_cache_mla"
DECODE = ("all decode", "all decode, 20 heads", "padded decode")
PREFILL = ("one prefill among decodes", "all short prompts")
BRANCHES = {
    "on": dict.fromkeys(DECODE, (AITER_OP,)) | dict.fromkeys(PREFILL, (ROTARY, OWN_WRITE)),
    "on, fused": dict.fromkeys(DECODE, (AITER_OP,)) | dict.fromkeys(PREFILL, (FUSED,)),
}
"""What our op launches in each kind of batch; in a dummy run it has no rows."""
SHOWN = ("all decode", "all decode, 20 heads", "one prefill among decodes")


class Cost(NamedTuple):
    """What one layer costs in one batch: kernels launched, buffers allocated, bytes read and written."""

    launches: int
    allocations: int
    moved: int

    def __str__(self) -> str:
        """Return a cell: ``launches / allocations / bytes``."""
        return f"{self.launches} / {self.allocations} / {self.moved}"


class Row(NamedTuple):
    """One kind of batch in one graph mode; the costs in the order of ``SIDES``."""

    cache: str
    kind: str
    mode: str
    costs: tuple[Cost, ...]


Events = Mapping[str, Sequence[Any]]
"""By kind of batch: ``counter.Event`` in order."""
Counted = Mapping[str, Sequence[Events]]
"""By cache: the events of each side, in the order of ``SIDES``."""


def run(argv: Sequence[str]) -> int:
    Parser(__doc__, "ledger.py").parse_args(argv)
    counted = count_all()
    print(render(counted))
    found = [f"ABOVE VLLM: {line}" for line in violations(rows_of(counted))]
    found += [f"ANOTHER BRANCH: {line}" for line in strays(counted)]
    print("\n".join(found) or "flag on is at most flag off in every row")
    return 1 if found else 0


def count_all() -> Counted:
    return {cache: [count(side, cache) for side in SIDES] for cache in CACHES}


def count(side: str, cache: str) -> Events:
    """Return the events of one of ``SIDES`` over one of ``CACHES``, by kind of batch."""
    from tools.counting import stub_layer

    found = {}
    for kind in stub_layer.BATCHES:
        with stub_layer.step(cache, kind) as layer:
            calls = stub_layer.calls(layer)
            captured, called = ([calls[name] for name in names] for names in SIDES[side])
            _count(layer, captured, called)  # a rotary table is copied once, at the first call
            found[kind] = _count(layer, captured, called)
    return found


def _count(layer: Any, captured: Sequence[Callable[[], Any]], called: Sequence[Callable[[], Any]]) -> list[Any]:
    import torch
    from vllm.platforms import current_platform

    from tools.counting import counter as counting

    counter, sizes = counting.Counter(), counting.sizes

    def quantised(absorbed: torch.Tensor, q_pe: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        shape = (*absorbed.shape[:-1], absorbed.shape[-1] + q_pe.shape[-1])
        return absorbed.new_empty(shape, dtype=current_platform.fp8_dtype())

    write = counter.one_launch(
        "concat_and_cache_mla", layer.impl.do_kv_cache_update, lambda _, *args: counting.concat_and_write(*args[:4])
    )
    quantise = counter.one_launch("concat + fp8", quantised, lambda result, *args: sizes((result, *args)), 1)
    implementation = type(layer.impl)
    decode = counter.one_launch("decode attention", implementation.decode, lambda result, _, q: sizes((q, result)), 1)

    with (
        mock.patch.object(layer.impl, "do_kv_cache_update", write),
        mock.patch.object(implementation, "decode", decode),
        mock.patch.object(layer._decode_concat_quant_fp8_op, "forward", quantise),
        counter,
    ):
        with counter.inside_a_piece():
            for call in captured:
                call()
        for call in called:
            call()
    return [event for event in counter.events if event.launches or event.allocations]


def rows_of(counted: Counted) -> list[Row]:
    """Return a row for each cache, kind of batch and mode that it can run in."""
    return [
        Row(cache, kind, said, tuple(cost(events[kind], mode) for events in sides))
        for cache, sides in counted.items()
        for kind in sides[0]
        for said, mode in modes(kind).items()
    ]


def modes(kind: str) -> dict[str, str]:
    """Return the graph modes by their names in the table: vLLM replays full graphs only for decode rows."""
    whole = {"full, derived": "full"} if kind in DECODE else {"full, runs piecewise": "piecewise"}
    return {"none": "none", "piecewise": "piecewise"} | whole


def cost(events: Iterable[Any], mode: str) -> Cost:
    """Return the sum of a layer's events. A replayed graph asks the allocator for nothing."""
    found = list(events)
    asked = [event for event in found if mode == "none" or (mode == "piecewise" and not event.captured)]
    moved = sum(event.moved for event in found)
    return Cost(sum(event.launches for event in found), sum(event.allocations for event in asked), moved)


def violations(rows: Iterable[Row]) -> list[str]:
    """Return one line for each figure of flag on that is above that of flag off with the same options."""
    found = []
    for row in rows:
        sides = dict(zip(SIDES, row.costs, strict=True))
        for on in BRANCHES:
            off = sides[on.replace("on", "off")]._asdict()
            where = f"{row.cache} cache, {row.kind}, graphs {row.mode}, {on}"
            more = {name: value for name, value in sides[on]._asdict().items() if value > off[name]}
            found += [f"{where}: {name} {value}, flag off {off[name]}" for name, value in more.items()]
    return found


def strays(counted: Counted) -> list[str]:
    """Return one line for each kind of batch in which our op did not launch what it is there to launch."""
    found = []
    for cache, sides in counted.items():
        for side, of in zip(SIDES, sides, strict=True):
            for kind, events in of.items() if side in BRANCHES else ():
                ran = tuple(event.name for event in events if event.name in (AITER_OP, FUSED, ROTARY, OWN_WRITE))
                wanted = BRANCHES[side].get(kind, ())  # a dummy run launches none of them
                if ran != wanted:
                    found.append(f"{cache} cache, {kind}, {side}: launches of our op {ran}, expected {wanted}")
    return found


def render(counted: Counted) -> str:
    """Return the tables as Markdown: costs, and for ``SHOWN`` the launches in order."""
    lines, rows = [], rows_of(counted)
    for cache, sides in counted.items():
        lines += [f"## KV cache: {cache}", ""]
        of_cache = [row for row in rows if row.cache == cache]
        lines += table(("batch", "graphs", *SIDES), [(row.kind, row.mode, *row.costs) for row in of_cache], "---")
        order = [(kind, side, _order(of[kind])) for kind in SHOWN for side, of in zip(SIDES, sides, strict=True)]
        lines += ["", *table(("batch", "side", "launches in order; (replayed by a piecewise graph)"), order, "---"), ""]
    return "\n".join(lines).strip()


def _order(events: Iterable[Any]) -> str:
    names = [(event.name.rpartition("::")[2], event.captured) for event in events if event.launches]
    return ", ".join(f"({name})" if captured else name for name, captured in names)


main = partial(guarded, "ledger", run)

if __name__ == "__main__":
    sys.exit(main())
