"""What must hold after a step, each under a name of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from vllm_aiter_mla.harness import attention
from vllm_aiter_mla.harness.engines import Probe
from vllm_aiter_mla.harness.subject import Outputs, Subject, query_name
from vllm_aiter_mla.harness.world import GUARD_BLOCKS, Layer, World, raw
from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.compare import OWN_BMM, difference
from vllm_aiter_mla.kernels.inputs import DecodeInputs

ORACLES: dict[str, str] = {
    "runs": "the step runs, and its capture succeeds",
    "shape-and-dtype": "results have the shape and dtype their fakes declare",
    "query-nope": "the query's un-rotated half is the reference's: to the bit, or a step off where a kernel has a BMM",
    "query-rope": "the query's rotated half is the reference's: to the bit, or one step off on 1 % of the values",
    "finite": "defined rows hold no NaN and no Inf",
    "cache-rows": "the written cache rows are the reference's",
    "cache-elsewhere": "every other byte of the cache, and of the guards around it, is what it was",
    "inputs-unchanged": "the operands are what they were",
    "attention-output": "the attention's output is that of a reference attention, within 2 % of a row's length",
    "no-sync": "nothing waits for the device while a graph is captured",
    "no-table-copy": "no call copies the cos/sin table",
    "memory": "replays ask for no memory, and thousands of them hold no more of it",
    "launches": "a layer launches what its back end should",
    "no-re-record": "Inductor records each size once, and warns of no shape",
}  # fmt: skip

ROPE_SHARE = 0.01
ROW_ERROR = 0.02


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken oracle: its name, and what was seen."""

    oracle: str
    message: str


@dataclass(frozen=True, slots=True)
class Right:
    """What one layer should look like after a step: one of several where more than one rounding is right.

    Attributes:
        queries: q_prepared [T, N, latent+R], per accepted rounding.
        storages: the guarded cache, per accepted rounding.
        out: [n, N*V], or None where no attention runs.
    """

    queries: list[torch.Tensor]
    storages: list[torch.Tensor]
    out: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Before:
    """A step's operands and caches before it ran, and what should come of them."""

    inputs: list[DecodeInputs]
    copies: dict[str, torch.Tensor]
    storages: list[torch.Tensor]
    right: list[Right]


def prepare(world: World, subject: Subject, size: int, slots: int | None, attends: bool) -> Before:
    """Copy what a step may touch, and compute what it should give. Call it after ``World.step``."""
    inputs = [world.inputs(layer, size, slots) for layer in world.layers]
    right = [_right(world, subject, layer, own, attends) for layer, own in zip(world.layers, inputs, strict=True)]
    return Before(inputs, _copies(world), [layer.storage.clone() for layer in world.layers], right)


def _right(world: World, subject: Subject, layer: Layer, inputs: DecodeInputs, attends: bool) -> Right:
    queries, storages = [], []
    for numerics in subject.numerics(inputs):
        twin, storage = world.twin(inputs)
        queries.append(reference.prepare(twin, numerics))
        storages.append(storage)
    if not attends or world.batch.dummy:
        return Right(queries, storages, None)
    shadow = replace(layer, storage=storages[0])
    n = world.batch.rows
    if world.batch.prefill_rows:
        out = attention.mixed_attention(world, shadow, attention.rotated_copies(world, layer, n))
    else:
        out = attention.decode_attention(world, shadow, queries[0][:n])
    return Right(queries, storages, out)


def _copies(world: World) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in _operands(world)}


def _operands(world: World) -> Iterator[tuple[str, torch.Tensor]]:
    yield from (
        ("cos_sin_cache", world.table),
        ("positions", world.positions),
        ("slot_mapping", world.slots),
        ("block table", world.row_blocks),
        ("sequence lengths", world.row_keys),
    )
    for i, layer in enumerate(world.layers):
        for name in ("q", "k_pe", "kv_c", "w_uk_t", "w_uv", "k_scale", "q_scale"):
            yield f"{name} of layer {i}", getattr(layer, name)


def check(world: World, subject: Subject, before: Before, outputs: Outputs) -> list[Finding]:
    """Every oracle of a step that has run."""
    findings: list[Finding] = []
    for i, layer in enumerate(world.layers):
        got = outputs[query_name(i)]
        shape = list(_shape(subject, before.inputs[i], got, i))
        findings += shape
        if not shape:
            findings += _query(subject, before.inputs[i], got, before.right[i], i)
        findings += _cache(subject, layer, before, i)
        findings += _output(world, layer, before.right[i], outputs, i)
    return findings + list(_inputs(world, before))


def _shape(subject: Subject, inputs: DecodeInputs, got: torch.Tensor, index: int) -> Iterator[Finding]:
    declared = subject.declare(inputs)
    if got.shape != declared.shape or got.dtype != declared.dtype:
        was, wanted = (f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (got, declared))
        yield Finding("shape-and-dtype", f"layer {index}: the fake declares {wanted}, the op returned {was}")


def _query(subject: Subject, inputs: DecodeInputs, got: torch.Tensor, right: Right, index: int) -> Iterator[Finding]:
    rows = subject.defined(inputs).nonzero().flatten()
    if not rows.numel():
        return
    lat = inputs.latent_dim
    mine = _rows(got, rows)
    if not bool(mine.float().isfinite().all()):
        yield Finding("finite", f"layer {index}: q_prepared holds NaN or Inf in {_bad_rows(mine, rows)}")
        return
    expected = [_rows(query, rows) for query in right.queries]
    nope = _least(mine[..., :lat], [e[..., :lat] for e in expected], subject.reference_bmm, OWN_BMM.slack, 1.0)
    rope = _least(mine[..., lat:], [e[..., lat:] for e in expected], subject.exact_rope, 0.0, ROPE_SHARE)
    if nope:
        yield Finding("query-nope", f"layer {index}: {nope}")
    if rope:
        yield Finding("query-rope", f"layer {index}: {rope}")


def _rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of the first dimension, by bytes: indexing is not implemented for fp8 everywhere."""
    data = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
    return data.index_select(0, rows).view(x.dtype)


def _bad_rows(x: torch.Tensor, rows: torch.Tensor) -> str:
    bad = rows[~x.float().isfinite().flatten(1).all(dim=1)].tolist()
    return f"row(s) {', '.join(map(str, bad[:6]))}{' ...' if len(bad) > 6 else ''}"


def _least(got: torch.Tensor, accepted: list[torch.Tensor], exact: bool, slack: float, share: float) -> str:
    """Why ``got`` is none of ``accepted``, or an empty string."""
    reasons = [_distance(got, expected, exact, slack, share) for expected in accepted]
    return "" if "" in reasons else reasons[0]


def _distance(got: torch.Tensor, expected: torch.Tensor, exact: bool, slack: float, share: float) -> str:
    if torch.equal(raw(got), raw(expected)):
        return ""
    found = difference(got.contiguous(), expected.contiguous(), slack)
    if not exact and found.steps <= 1 and found.share <= share:
        return ""
    wrong = (got.float() != expected.float()).nonzero()
    where = f", first at {wrong[0].tolist()}" if wrong.numel() else ""
    allowed = "none may" if exact else f"one step on {share:.0%} may"
    return f"{found.share:.1%} of the values differ, up to {found.steps} step(s){where}; {allowed}"


def _cache(subject: Subject, layer: Layer, before: Before, index: int) -> Iterator[Finding]:
    inputs, storage = before.inputs[index], before.storages[index]
    width, lat = layer.storage.shape[2], inputs.latent_dim
    slots = before.copies["slot_mapping"][: inputs.slot_mapping.shape[0]]
    written = slots[slots >= 0] + GUARD_BLOCKS * layer.storage.shape[1]
    if written.numel():
        got = _rows(layer.storage.view(-1, width), written)
        accepted = [_rows(own.view(-1, width), written) for own in before.right[index].storages]
        nope = _least(got[:, :lat], [rows[:, :lat] for rows in accepted], True, 0.0, 0.0)
        rope = _least(got[:, lat:], [rows[:, lat:] for rows in accepted], subject.exact_rope, 0.0, ROPE_SHARE)
        for part, reason in (("latent", nope), ("rotated", rope)):
            if reason:
                yield Finding("cache-rows", f"layer {index}: {part} part of the written rows: {reason}")
    yield from _elsewhere(layer, storage, written, index)


def _elsewhere(layer: Layer, storage: torch.Tensor, written: torch.Tensor, index: int) -> Iterator[Finding]:
    changed = (raw(layer.storage) != raw(storage)).view(-1, layer.storage.shape[2] * storage.dtype.itemsize).any(dim=1)
    changed[written] = False
    if bool(changed.any()):
        first = int(changed.nonzero()[0]) - GUARD_BLOCKS * layer.storage.shape[1]
        yield Finding(
            "cache-elsewhere",
            f"layer {index}: {int(changed.sum())} cache row(s) that belong to no slot of the step were written, "
            f"first slot {first}",
        )


def _output(world: World, layer: Layer, right: Right, outputs: Outputs, index: int) -> Iterator[Finding]:
    if right.out is None or not world.batch.rows:
        return
    n = world.batch.rows
    got = layer.out[:n].float()
    if not bool(got.isfinite().all()):
        yield Finding(
            "finite", f"layer {index}: the attention's output holds NaN or Inf in {_bad_rows(got, _all(n, got))}"
        )
        return
    wanted = right.out.float()
    error = (got - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-6)
    if float(error.max()) > ROW_ERROR:
        row = int(error.argmax())
        kind = "prefill" if row >= world.batch.decode_rows else "decode"
        yield Finding("attention-output", f"layer {index}: {kind} row {row} is off by {float(error.max()):.0%}")
    final = outputs.get(f"final.{index}")
    if final is not None and not torch.equal(raw(final[:n]), raw(layer.out[:n] * 2)):
        yield Finding("attention-output", f"layer {index}: what follows the attention did not see its output")


def _all(n: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(n, device=like.device)


def _inputs(world: World, before: Before) -> Iterator[Finding]:
    for name, tensor in _operands(world):
        if not torch.equal(raw(tensor), raw(before.copies[name])):
            yield Finding("inputs-unchanged", f"{name} was changed by the step")


def check_probe(probe: Probe, table_rows: int) -> list[Finding]:
    """Oracles of one eager call before the capture: synchronisations, and copies as long as the table."""
    findings = []
    if probe.syncs:
        findings.append(Finding("no-sync", f"the call waits for the device: {', '.join(sorted(set(probe.syncs)))}"))
    copies = [f"{name} -> {list(shape)}" for name, shape, _ in probe.shapes if table_rows in shape]
    if copies:
        findings.append(Finding("no-table-copy", f"every call makes a copy of the cos/sin table: {copies[0]}"))
    return findings
