"""The op inside ``torch.compile``: Inductor makes its own graphs, and must neither record again nor warn of a shape."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from vllm_aiter_mla.ops import bodies
from vllm_aiter_mla.verify.buffers import Buffers
from vllm_aiter_mla.verify.cases import Case
from vllm_aiter_mla.verify.engine import EagerEngine
from vllm_aiter_mla.verify.layer import Batch
from vllm_aiter_mla.verify.oracles import Expected, Finding
from vllm_aiter_mla.verify.subject import Subject, context_of, fused, query_name

ROUNDS = 6
_TROUBLE = re.compile(
    r"re-?record|(size|shape|stride) mismatch|distinct (input )?size|skipping cudagraphs", re.IGNORECASE
)
_number = itertools.count()


def run(case: Case, buffers: Buffers, subject: Subject, engine: EagerEngine) -> list[Finding]:
    """Compile one op call per size and replay it; the oracles of every other case, and Inductor's own log.

    Without a GPU Inductor makes no graphs: what is left is its check of results against the fake.
    """
    library = torch.library.Library(f"vllm_aiter_mla_verify_{next(_number)}", "DEF")
    op = _define(library, buffers, subject)
    torch._dynamo.reset()
    mode = "reduce-overhead" if engine.graphs else "default"
    compiled = torch.compile(lambda *operands: op(*operands), mode=mode, dynamic=False, fullgraph=True)
    try:
        with _logged() as lines:
            findings = [f for size in case.sizes for f in _replay(buffers, subject, compiled, engine, size)]
        return findings + [Finding("no-re-record", line) for line in lines if _TROUBLE.search(line)]
    finally:
        torch._dynamo.reset()
        library._destroy()


def _define(library: torch.library.Library, buffers: Buffers, subject: Subject) -> Callable[..., torch.Tensor]:
    """The op as the plugin registers it: functional to the graph, its cache and slots from outside."""
    context = context_of(buffers, subject, 0)

    def real(q: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return fused(context, (q, k_pe, kv_c, positions))

    def fake(q: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return bodies.declared(q, k_pe, kv_c, buffers.variant.out)

    library.define("prepare(Tensor q, Tensor k_pe, Tensor kv_c, Tensor positions) -> Tensor")
    library.impl("prepare", real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{library.ns}::prepare", fake, lib=library)
    return getattr(torch.ops, library.ns).prepare.default


def _replay(
    buffers: Buffers, subject: Subject, compiled: Callable[..., torch.Tensor], engine: EagerEngine, size: int
) -> Iterator[Finding]:
    for number in range(ROUNDS):
        buffers.step(Batch(max(size - number % 2, 1)))
        expected = Expected(buffers, subject, size, None, attends=False)
        if engine.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            got = compiled(*buffers.layers[0].operands(size))
        except AssertionError as error:  # Inductor's own check of a result against the fake
            yield Finding("shape-and-dtype", f"T={size}: {str(error).splitlines()[0]}")
            return
        engine.synchronize()
        found = expected.check({query_name(0): got})
        yield from found
        if found:
            return


@contextmanager
def _logged() -> Iterator[list[str]]:
    """The first line of each message that Inductor's graph code logs, at whatever level."""
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
