"""The op inside ``torch.compile``: Inductor makes its own graphs, and must neither record again nor warn of a shape."""

from __future__ import annotations

import itertools
import logging
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from vllm_aiter_mla.verify import oracles
from vllm_aiter_mla.verify.cases import Case
from vllm_aiter_mla.verify.engines import Engine
from vllm_aiter_mla.verify.oracles import Finding
from vllm_aiter_mla.verify.runner import Options
from vllm_aiter_mla.verify.setting import Variant
from vllm_aiter_mla.verify.subject import Call, Subject, query_name
from vllm_aiter_mla.verify.world import Batch, World

ROUNDS = 6
_TROUBLE = re.compile(
    r"re-?record|(size|shape|stride) mismatch|distinct (input )?size|skipping cudagraphs", re.IGNORECASE
)
_SCHEMA = "(Tensor q, Tensor k_pe, Tensor kv_c, Tensor positions) -> Tensor"
_number = itertools.count()


def run(case: Case, variant: Variant, subject: Subject, engine: Engine, options: Options) -> list[Finding]:
    """Compile one op call per size and replay it; the oracles of every other case, and Inductor's own log.

    Without a GPU Inductor makes no graphs: what is left is its check of results against the fake.
    """
    seed = zlib.crc32(f"{options.seed}/{case.name}/{variant.name}".encode())
    world = World(options.geometry, variant, options.limit, 1, 1, engine.device, seed)
    library = torch.library.Library(f"vllm_aiter_mla_verify_{next(_number)}", "DEF")
    op = _define(library, world, subject)

    def step(q: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return op(q, k_pe, kv_c, positions)

    torch._dynamo.reset()
    mode = "reduce-overhead" if engine.graphs else "default"
    compiled = torch.compile(step, mode=mode, dynamic=False, fullgraph=True)
    try:
        with _listening() as heard:
            findings = [f for size in case.sizes for f in _replay(world, subject, compiled, engine, size)]
        return findings + [Finding("no-re-record", line) for line in heard]
    finally:
        torch._dynamo.reset()
        library._destroy()


def _define(library: torch.library.Library, world: World, subject: Subject) -> Callable[..., torch.Tensor]:
    """The op as the plugin registers it: functional to the graph, its cache and slots from outside."""

    def call(q: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, positions: torch.Tensor) -> Call:
        layer = world.layers[0]
        inputs = world.inputs(layer, q.shape[0])
        return Call(replace(inputs, q=q, k_pe=k_pe, kv_c=kv_c, positions=positions), world.batch, layer)

    def real(q: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return subject.prepare(call(q, k_pe, kv_c, positions))

    def fake(q: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        width = kv_c.shape[-1] + k_pe.shape[-1]
        return q.new_empty((q.shape[0], q.shape[1], width), dtype=world.variant.out)

    library.define(f"prepare{_SCHEMA}")
    library.impl("prepare", real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{library.ns}::prepare", fake, lib=library)
    return getattr(torch.ops, library.ns).prepare.default


def _replay(
    world: World, subject: Subject, compiled: Callable[..., torch.Tensor], engine: Engine, size: int
) -> Iterator[Finding]:
    layer = world.layers[0]
    for number in range(ROUNDS):
        world.step(size, Batch(max(size - number % 2, 1)))
        before = oracles.prepare(world, subject, size, None, attends=False)
        if engine.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            got = compiled(layer.q[:size], layer.k_pe[:size], layer.kv_c[:size], world.positions[:size])
        except AssertionError as error:  # Inductor's own check of a result against the fake
            yield Finding("shape-and-dtype", f"T={size}: {str(error).splitlines()[0]}")
            return
        engine.synchronize()
        found = oracles.check(world, subject, before, {query_name(0): got})
        yield from found
        if found:
            return


@contextmanager
def _listening() -> Iterator[list[str]]:
    """Collect what Inductor's graph code says about recording again and about shapes."""
    import torch._inductor.cudagraph_trees  # noqa: F401  its loggers exist from here on

    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage().strip()
            if _TROUBLE.search(text):
                heard.append(text.splitlines()[0])

    ear = Ear(level=logging.DEBUG)
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch._inductor.cudagraph")]
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(ear)
        logger.setLevel(logging.DEBUG)
    try:
        yield heard
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(ear)
            logger.setLevel(level)
