# SPDX-License-Identifier: Apache-2.0
"""Layers of plain tensors in place of vLLM's, the buffers that serving keeps, and the steps of a model over them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from vllm_aiter_mla.kernels import absorb, formats, reference
from vllm_aiter_mla.kernels.absorb import AbsorbWeight
from vllm_aiter_mla.kernels.backend import KernelBackend, Run
from vllm_aiter_mla.kernels.inputs import K_SCALE, OVERFLOW_FACTOR, Q_SCALE, DecodeInputs, GuardedInputs, step_key
from vllm_aiter_mla.serving import ops as bodies
from vllm_aiter_mla.verify import data
from vllm_aiter_mla.verify.cases import FRESH, Item

# Blocks before and after the cache. A write out of bounds stays inside the allocation and is seen.
GUARD_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class Batch:
    """What Python knows of a step: our attention metadata."""

    rows: int  # real rows; the others have slot -1 and keep whatever the last step left
    num_prefills: int = 0  # how many of the real rows, the last ones, belong to a prefill; the op looks whether any do
    dummy: bool = False  # no metadata at all, as while vLLM captures a piecewise graph

    @property
    def decode_rows(self) -> int:
        """Real rows of decode requests."""
        return self.rows - self.num_prefills


class Rows(NamedTuple):
    """What a step's matrix products hand to a layer, not rotated."""

    q: torch.Tensor  # [L, N, P+R] act, a slice of wider rows
    k_pe: torch.Tensor  # [L, R] act, a slice of one tensor with kv_c
    kv_c: torch.Tensor  # [L, latent] act

    def first(self, size: int) -> Rows:
        """Return views of the first ``size`` rows: a graph sees what the next step writes."""
        return Rows(*(tensor[:size] for tensor in self))


@dataclass(frozen=True, slots=True)
class Layer:
    """What the op bodies ask of a layer, over tensors of its own and the buffers that all layers share.

    Decode rows read the cache without a host synchronisation. No row reads another, so padded rows may hold anything.
    Prefill rows read q, k_pe and kv_c as handed over, so a missing or a second rotation changes the output.
    """

    buffers: Buffers
    source: Rows  # the rows of a step, which nothing may change
    work: Rows  # a captured segment copies ``source`` here; the op reads these rows and may rotate them in place
    w_uk: AbsorbWeight
    w_uv: torch.Tensor  # [N, latent, V] act
    storage: torch.Tensor  # [GUARD + blocks + GUARD, block_size, latent+R], the cache between its guards
    table: torch.Tensor  # cos and sin, [max_position, R]; a draft's layer may have another one than its target's
    k_scale: torch.Tensor  # one float32
    q_scale: torch.Tensor  # one float32
    out: torch.Tensor  # [L, N*V] act, the attention's output
    tested: Run | None = None  # the kernel under test; None in a layer that computes the expected result

    @property
    def out_heads(self) -> int:
        """M, the heads for which a kernel may lay the query out; 0 for N."""
        return self.buffers.geometry.out_heads

    @property
    def kv_cache(self) -> torch.Tensor:
        """[blocks, block_size, latent+R] without the guards."""
        return self.storage[GUARD_BLOCKS:-GUARD_BLOCKS]

    def rope(self, positions: torch.Tensor) -> bodies.Rope:
        """Return the rotation at these positions."""
        return bodies.Rope(
            positions, self.table, self.k_scale, self.buffers.variant.is_neox, "the layer's own rotation"
        )

    def inputs(self, size: int) -> DecodeInputs:
        """Return what the kernel should receive for ``size`` rows."""
        return DecodeInputs(
            **self.source.first(size)._asdict(),
            weight=self.weight(),
            kv_cache=self.kv_cache,
            slot_mapping=self.buffers.slots[:size],
            positions=self.buffers.positions[:size],
            cos_sin_cache=self.table,
            k_scale=self.k_scale,
            q_scale=self.q_scale,
            is_neox=self.buffers.variant.is_neox,
            out_dtype=self.buffers.variant.out,
            out_heads=self.out_heads,
        )

    def weight(self) -> AbsorbWeight:
        """Return the absorb weight. From here on the methods are those that the op bodies call."""
        return self.w_uk

    def query_dtype(self, act: torch.dtype) -> torch.dtype:
        """Return the variant's query dtype."""
        return self.buffers.variant.out

    def kernel(self, inputs: DecodeInputs) -> Run | None:
        """Return the kernel under test."""
        return self.tested

    def fail(self, error: Exception) -> None:
        """Raise ``error``: a failure is what this run looks for."""
        raise error

    @staticmethod
    def rotate(q_pe: torch.Tensor, k_pe: torch.Tensor, rope: bodies.Rope) -> torch.Tensor:
        """Rotate q_pe [T, N, R] and k_pe [T, 1, R] in place with the reference, and round once; return k_pe."""
        cos, sin = (half.unsqueeze(1) for half in reference.gather_cos_sin(rope.table, rope.positions))
        for x in (q_pe, k_pe):
            x.copy_(reference.rotate(x, cos, sin, rope.is_neox))
        return k_pe

    def write(
        self, kv_c: torch.Tensor, k_pe: torch.Tensor, slots: torch.Tensor, metadata: Batch, rope: bodies.Rope
    ) -> None:
        """Write the KV rows as vLLM's kernel does, which divides by the scale.

        Raises:
            AssertionError: the operands differ in their number of rows.
        """
        assert len(slots) == len(k_pe) == len(kv_c) == len(rope.positions), "one slot per row"
        joint = torch.cat([kv_c, k_pe.squeeze(1)], dim=-1)
        no_scale = torch.ones_like(rope.k_scale)
        scaled = joint.float() / rope.k_scale if formats.is_fp8(self.kv_cache.dtype) else joint
        rows = reference.store_nope(scaled, no_scale, self.kv_cache.dtype, reference.VLLM_KERNEL)
        reference.scatter_rows(self.kv_cache, slots, rows)

    def forward_mqa(self, q_prepared: torch.Tensor, kv_cache: torch.Tensor, metadata: Batch) -> torch.Tensor:
        """Attend in float32, each row over the first ``row_keys`` keys of its own blocks."""
        scale = self.q_scale if formats.is_fp8(q_prepared.dtype) else 1.0
        query = self.inputs(len(q_prepared)).real_heads(q_prepared)
        return self._attend_cache(query.float() * scale, kv_cache)

    def v_up(self, attended: torch.Tensor, out: torch.Tensor) -> None:
        """Project in float32 and round once."""
        out.copy_(torch.einsum("tnl,nlv->tnv", attended, self.w_uv.float()).flatten(1))

    def vllm_forward(
        self, q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, metadata: Batch | None, output: torch.Tensor
    ) -> None:
        """Let decode rows attend over the cache, and prefill rows over each other's keys as they were handed over."""
        if metadata is None:
            output.zero_()
            return
        n, rows = metadata.decode_rows, metadata.rows
        nope = self.buffers.geometry.nope
        absorbed = self.w_uk.reference(q[:rows, :, :nope])
        query = torch.cat([absorbed.float(), q[:rows, :, nope:].float()], dim=-1)
        self.v_up(self._attend_cache(query[:n], self.kv_cache), output[:n])
        keys = torch.cat([kv_c[n:rows], k_pe[n:rows].flatten(1)], dim=-1).float()
        self.v_up(self._attend(query[n:], keys, self.buffers.row_keys.new_full((rows - n,), rows - n)), output[n:rows])

    def _attend_cache(self, query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Attend over paged keys: query [n, N, L+R] in real units -> [n, N, L]."""
        n = query.shape[0]
        picked = raw(cache).index_select(0, self.buffers.row_blocks[:n].flatten()).view(cache.dtype)
        keys = picked.view(n, self.buffers.geometry.blocks * cache.shape[1], cache.shape[2]).float()
        if formats.is_fp8(cache.dtype):
            keys = keys * self.k_scale
        return self._attend(query, keys, self.buffers.row_keys[:n])

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Query [n, N, L+R] over the first ``counts`` [n] of keys [n, K, L+R], or of [K, L+R] for all -> [n, N, L].

        A row without a key gives zeros.
        """
        g, own = self.buffers.geometry, "tk" if keys.dim() == 3 else "k"
        hidden = torch.arange(keys.shape[-2], device=query.device) >= counts.view(-1, 1, 1)
        logits = torch.einsum(f"tnd,{own}d->tnk", query, keys) * (g.nope + g.rope) ** -0.5
        weights = torch.softmax(logits.masked_fill(hidden, -torch.inf), dim=-1).masked_fill(hidden, 0.0)
        return torch.einsum(f"tnk,{own}l->tnl", weights, keys[..., : g.latent])


class Buffers:
    """Everything whose address a captured graph may hold. A step changes it in place and never replaces it."""

    def __init__(self, item: Item, device: str) -> None:
        self.case, self.variant, self.geometry, self.device = item.case, item.variant, item.geometry, device
        # The data do not depend on which other cases run.
        seed = zlib.crc32(f"{item.seed}/{item.case.name}/{item.variant.name}".encode())
        self.generator = torch.Generator().manual_seed(seed)
        self._pool = data.pool(item.seed, device, self.variant.act)
        self.limit = limit = item.limit + 1  # rows of every buffer: one batch is larger than every graph
        self.blocks = limit * item.geometry.blocks + 1
        self.positions = torch.zeros(limit, dtype=torch.int64, device=device)
        self.slots = torch.full((limit,), -1, dtype=torch.int64, device=device)
        self.row_blocks = torch.zeros((limit, item.geometry.blocks), dtype=torch.int64, device=device)
        self.row_keys = torch.zeros(limit, dtype=torch.int64, device=device)
        self.layers = tuple(self._layer(index) for index in range(item.case.layers))
        self.batch = Batch(0, dummy=True)

    def _normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return self._pool.activations(shape, self.generator, scale)

    def _table(self) -> torch.Tensor:
        angles = torch.rand(self.geometry.max_position, self.geometry.rope // 2, generator=self.generator) * 6.283
        return torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.variant.act).to(self.device)

    def _rows(self) -> Rows:
        """Make slices of wider rows, as vLLM hands them over: a kernel that assumes dense rows reads the wrong one."""
        g, width = self.geometry, self.geometry.latent + self.geometry.rope
        q = self._normal(self.limit, g.heads, g.nope + g.rope + 16)[..., : g.nope + g.rope]
        joint = self._normal(self.limit, width + 16)
        return Rows(q, joint[:, g.latent : width], joint[:, : g.latent])

    def _weight(self) -> AbsorbWeight:
        g = self.geometry
        return absorb.make(self._normal(g.heads, g.nope, g.latent, scale=g.nope**-0.5), self.variant.weight)

    def _value_weight(self) -> torch.Tensor:
        g = self.geometry
        return self._normal(g.heads, g.latent, g.v, scale=g.latent**-0.5)

    def _layer(self, index: int) -> Layer:
        g, width = self.geometry, self.geometry.latent + self.geometry.rope
        table, own = self._table(), own_scale(index)
        blocks = (self.blocks + 2 * GUARD_BLOCKS, g.block_size, width)
        return Layer(
            buffers=self,
            source=self._rows(),
            work=self._rows(),
            w_uk=self._weight(),
            w_uv=self._value_weight(),
            storage=self._pool.cache_rows(blocks, self.generator, self.variant.cache, 1 / (K_SCALE * own)),
            table=table,
            k_scale=torch.tensor([K_SCALE * own], device=self.device),
            q_scale=torch.tensor([Q_SCALE * own], device=self.device),
            out=torch.zeros(self.limit, g.heads * g.v, dtype=self.variant.act, device=self.device),
        )

    def before_capture(self, batch: Batch) -> None:
        """Prepare a capture: no slots, no keys, zero positions. ``batch`` is what Python can read meanwhile."""
        self.slots.fill_(-1)
        self.row_keys.zero_()
        self.positions.zero_()
        self.batch = batch

    def step(self, batch: Batch, fresh: Iterable[str] = FRESH) -> None:
        """Make the next step, with ``batch`` as its metadata.

        Padded rows get slot -1 and keep their stale positions, as in serving. ``fresh`` says what changes. Everything
        changes if the number of real rows does.
        """
        rows = batch.rows
        # New data also for rows that leave now: written to the slot that they had, the old data would not show.
        used = max(rows, self.batch.rows)
        fresh = FRESH if rows != self.batch.rows else fresh
        if "data" in fresh:
            for layer in self.layers:
                for buffer in layer.source:
                    buffer[:used] = self._normal(used, *buffer.shape[1:])
        if "positions" in fresh:
            drawn = torch.randint(0, self.geometry.max_position, (rows,), generator=self.generator)
            if rows > 2:  # both ends of the table, whatever is drawn; fewer rows would hardly change between steps
                drawn[drawn.argmin()], drawn[drawn.argmax()] = 0, self.geometry.max_position - 1
            self.positions[:rows] = drawn.to(self.device)
        if "slots" in fresh:
            self._place(batch)
        if self.case.padding is not None:
            for layer in self.layers:
                for buffer in layer.source:
                    buffer[rows:] = self.case.padding
        self.slots[rows:] = -1
        self.row_keys[rows:] = 0
        self.batch = batch

    def _place(self, batch: Batch) -> None:
        """Give every request new blocks: slots, block tables and visible keys of the real rows."""
        size, each = self.geometry.block_size, self.geometry.blocks
        capacity = size * each
        # Decode requests of ``width`` tokens, then one prefill chunk after another.
        parts = ((batch.decode_rows, self.case.width), (batch.num_prefills, capacity))
        counts = [min(most, total - first) for total, most in parts for first in range(0, total, most)]
        tokens = torch.tensor(counts, dtype=torch.int64)
        blocks = torch.randperm(self.blocks, generator=self.generator)[: len(tokens) * each].view(len(tokens), each)
        lengths = tokens + (torch.rand(len(tokens), generator=self.generator) * (capacity + 1 - tokens)).long()
        request = torch.arange(len(tokens)).repeat_interleave(tokens)
        keys = torch.arange(batch.rows) + (lengths - tokens.cumsum(0))[request]
        self.slots[: batch.rows] = (blocks[request, keys // size] * size + keys % size).to(self.device)
        self.row_blocks[: batch.rows] = blocks[request].to(self.device)
        self.row_keys[: batch.rows] = (keys + 1).to(self.device)

    def change(self, what: str) -> None:
        """Change in place what serving may change between replays: "weights", "scales", "table" or "overflow"."""
        for index, layer in enumerate(self.layers):
            if what == "table":
                layer.table.copy_(self._table())
            elif what == "weights":
                for (_, held), (_, fresh) in zip(layer.w_uk.tensors, self._weight().tensors, strict=True):
                    held.copy_(fresh)
                layer.w_uv.copy_(self._value_weight())
            elif what == "overflow":
                for rows in (layer.source.q, layer.source.k_pe, layer.source.kv_c):
                    rows.mul_(OVERFLOW_FACTOR)
            else:
                layer.k_scale.mul_(1.5 * own_scale(index))
                layer.q_scale.mul_(0.75 * own_scale(index))


def own_scale(index: int) -> float:
    """Return the factor from the first layer's scales to those of another one: a checkpoint calibrates each layer."""
    return 1 + index / 2


def raw(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``x``, a view if it is contiguous: NaNs compare equal, and fp8 can be indexed everywhere."""
    return x.contiguous().view(torch.uint8)


Outputs = dict[tuple[str, int], torch.Tensor]
"""("query", i) is the prepared query of layer i, ("final", i) what a reader of its attention output computed."""


class Segment(NamedTuple):
    """A part of a step: captured into a graph, or run again at every replay as vLLM runs a splitting op."""

    captured: bool
    run: Callable[[], object]  # once captured: replays the graph
    launches: tuple[str, ...] | str = ()  # names of what the graph launches, or why they are unknown


class ModelStep(NamedTuple):
    """The segments of a step in order, and its outputs, which every run brings up to date."""

    segments: list[Segment]
    outputs: Outputs

    def run(self) -> None:
        """Run every segment: without any graph, or what was captured as a replay."""
        for segment in self.segments:
            segment.run()

    @property
    def graphs(self) -> list[Segment]:
        """The segments that are captured."""
        return [segment for segment in self.segments if segment.captured]


def produce(source: Rows, work: Rows) -> None:
    """Write a step's rows again, as the matrix products before the op do."""
    for given, written in zip(source, work, strict=True):
        written.copy_(given)


def bound_once(backend: KernelBackend) -> Run:
    """Return what runs the back end as a served layer does: calls of one shape keep what their first one has bound.

    It raises ValueError if the back end takes no such call.
    """
    runs: dict[Any, tuple[tuple[Any, ...], Run]] = {}

    def run(inputs: DecodeInputs) -> torch.Tensor:
        held = (inputs.weight.values, inputs.weight.scale, inputs.cos_sin_cache, inputs.k_scale, inputs.q_scale)
        key = (step_key(inputs), inputs.kv_cache.data_ptr())
        kept, bound = runs.get(key, (None, None))
        if kept is None or bound is None or any(one is not other for one, other in zip(kept, held, strict=True)):
            binding = backend.bind(inputs)
            if isinstance(binding, str):
                raise ValueError(f"{backend.name}: {binding}")
            _, bound = runs[key] = held, binding.run
        return bound(inputs)

    return run


def make_op(buffers: Buffers, backend: KernelBackend, index: int, rows: Rows, outputs: Outputs) -> Callable[[], None]:
    """Return the op of layer ``index`` over ``rows``.

    The op looks up the current batch at every call and puts the prepared query into ``outputs``.
    """
    kind, size, run = buffers.case.kind, len(rows.q), bound_once(backend)

    def prepare(inputs: DecodeInputs) -> torch.Tensor:
        outputs["query", index] = query = run(GuardedInputs.of(inputs))
        return query

    layer = replace(buffers.layers[index], tested=prepare)
    positions, out = buffers.positions[:size], layer.out[:size]

    def op() -> None:
        batch = buffers.batch
        step = bodies.LayerStep(
            f"layer {index}", layer, layer.kv_cache, buffers.slots,
            None if batch.dummy else batch, batch.rows, not batch.dummy and not batch.num_prefills,
            lambda: kind == "piecewise",
        )  # fmt: skip
        rope = layer.rope(positions)
        outputs.pop(("query", index), None)
        if kind != "kernel":
            bodies.attention_with_rope(step, *rows, rope, out)
        elif (query := bodies.prepared_query(step, *rows, rope)) is not None:
            outputs["query", index] = query

    return op


def build(buffers: Buffers, backend: KernelBackend, size: int) -> ModelStep:
    """Build one step of ``size`` padded rows, captured as the kind of the case says."""
    kind, outputs, segments = buffers.case.kind, Outputs(), list[Segment]()
    for i, layer in enumerate(buffers.layers):
        rows = source = layer.source.first(size)
        if kind != "kernel":
            rows = layer.work.first(size)
            segments.append(Segment(True, partial(produce, source, rows)))
        segments.append(Segment(False, make_op(buffers, backend, i, rows, outputs)))

    def tail() -> None:
        # Something after the attention that a graph computes from its output buffer.
        outputs.update({("final", i): layer.out[:size] * 2 for i, layer in enumerate(buffers.layers)})

    if kind != "kernel":
        segments.append(Segment(True, tail))
    step = ModelStep(segments, outputs)
    return step if kind == "piecewise" else ModelStep([Segment(True, step.run)], outputs)
