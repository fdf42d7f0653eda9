"""The op inside ``torch.compile``: Inductor splits its graphs there, records each size once and warns of no shape."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.verify.engine import EagerEngine
from vllm_aiter_mla.verify.layer import Batch, Buffers, Rows
from vllm_aiter_mla.verify.oracles import Expected, Finding
from vllm_aiter_mla.verify.steps import Op, Outputs, make_op

ROUNDS = 6
_TROUBLE = re.compile(
    r"re-?record|(size|shape|stride) mismatch|distinct (input )?size|skipping cudagraphs", re.IGNORECASE
)
_number = itertools.count()


def run(buffers: Buffers, backend: KernelBackend, engine: EagerEngine) -> list[Finding]:
    """Compile one step per size and run batches of all kinds; check every oracle, and Inductor's log.

    Without a GPU Inductor makes no graphs, and this checks only that the op changes the buffers that it is given.
    """
    library = torch.library.Library(f"vllm_aiter_mla_verify_{next(_number)}", "DEF")
    outputs: Outputs = {}
    op = _define(library, make_op(buffers, backend, 0, outputs))
    layer = buffers.layers[0]

    def step(q: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, positions: torch.Tensor) -> tuple[Any, ...]:
        rows, out = (q * 1, k_pe * 1, kv_c * 1), q.new_empty((q.shape[0], layer.out.shape[1]))
        op(*rows, positions, out)
        return out * 2, *rows

    def replay(size: int, number: int) -> list[Finding]:
        rows = max(size - number % 2, 1)
        buffers.step(Batch(rows, rows // 2 if number % 3 == 2 else 0))
        expected = Expected(buffers, backend, size, rows)
        if engine.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        final, *produced = compiled(*layer.source.first(size), buffers.positions[:size])
        for buffer, got in zip((layer.out, *layer.work), (final / 2, *produced), strict=True):
            buffer[:size] = got  # where the oracles look
        engine.synchronize()
        return expected.check(outputs | {("final", 0): final})

    torch._dynamo.reset()
    options: dict[str, Any] = {"triton.cudagraphs": engine.graphs, "graph_partition": True}
    compiled = torch.compile(step, options=options, dynamic=False, fullgraph=True)
    try:
        with _logged() as lines:
            rounds = (replay(size, number) for size in buffers.case.sizes for number in range(ROUNDS))
            findings = next((found for found in rounds if found), [])
        return findings + [Finding("no-re-record", line) for line in lines if _TROUBLE.search(line)]
    finally:
        torch._dynamo.reset()
        library._destroy()


def _define(library: torch.library.Library, op: Op) -> Callable[..., None]:
    """Register the op as the plugin does: it changes its arguments, returns nothing and is outside graphs."""

    def attend(*given: torch.Tensor) -> None:
        *rows, positions, out = given
        op(Rows(*rows), positions, out)

    schema = "attend(Tensor(a!) q, Tensor(b!) k_pe, Tensor kv_c, Tensor positions, Tensor(c!) out) -> ()"
    library.define(schema, tags=(torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe))
    library.impl("attend", attend, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{library.ns}::attend", lambda *given: None, lib=library)
    return getattr(torch.ops, library.ns).attend.default


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect the first line of each message that Inductor's graph code logs, at any level."""
    import torch._inductor.cudagraph_trees  # noqa: F401  its loggers exist from here on

    lines: list[str] = []
    handler = logging.Handler(level=logging.DEBUG)
    handler.emit = lambda record: lines.append(record.getMessage().strip().split("\n")[0])  # type: ignore[method-assign]
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch._inductor.cudagraph")]
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        for logger, level in levels.items():
            logger.removeHandler(handler)
            logger.setLevel(level)
