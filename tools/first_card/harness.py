"""The kernels' cases on the card, and one graph replayed 10,000 times with all operands changed between the replays."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from tools.first_card import dry
from tools.first_card.asked import BLOCK, LATENT, Asked, seen_as_nothing, shape_of
from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.distance import ordinals
from vllm_aiter_mla.kernels.inputs import DecodeInputs, LayerShape, synthetic_inputs
from vllm_aiter_mla.kernels.triton.backend import TritonBackend


def verify(asked: Asked) -> dict[str, Any]:
    """Run the cases with every back end that is here: both ends of a decode limit of 1024, and all quick cases."""
    from vllm_aiter_mla.verify.cases import SMALL
    from vllm_aiter_mla.verify.session import Session

    since, counts, failed = time.monotonic(), {"passed": 0, "failed": 0, "skipped": 0, "not run": 0}, list[str]()
    oracles = set[str]()
    ends = {"case": ("both-ends-0-drafts",), "variant": ("fp8",)}
    if asked.dry == dry.VALUES:
        sessions = [Session(**ends, limit=8, geometry=SMALL)]
    elif asked.dry:
        sessions = [
            Session(("triton",), **ends, limit=1024),
            Session(("triton",), ("shared-pool",), quick=True, limit=128),
        ]
    else:
        sessions = [Session(case=("kernel-status",), limit=16), Session(**ends, limit=1024)]
        # What runs last is what a slow host leaves out.
        names = sorted({item.backend for item in sessions[0].items}, reverse=True)
        sessions += [Session((name,), quick=True, limit=128) for name in names]
    for session in sessions:
        run = session.run()
        for _ in session.items:
            if not asked.left(since):
                counts["not run"] += 1
                continue
            result = next(run)
            counts[result.status] += 1
            oracles |= {one.oracle for one in result.findings}
            found = [f"{one.oracle}: {one.message} at {one.step}" for one in result.findings[:2]]
            failed += [f"{session.command(result)}: {'; '.join(found)}"] * (result.status == "failed")
    found = {
        "counts": counts,
        "missing": sessions[0].missing,
        "failures": failed,
        "stopped": f"stopped after {asked.seconds:.0f} s: {counts['not run']} cases not run"
        if counts["not run"]
        else "",
        "ok": not failed and counts["passed"] > 0,
    }
    values = {"finite", "query-nope", "query-rope", "cache-rows"}
    return seen_as_nothing(found, bool(oracles & values)) if asked.dry == dry.LAUNCHES else found


HELD = {"slot_mapping": "cache", "q_scale": "latent", "weight": "latent"}
"""Planted faults: an operand whose value at the capture the graph keeps, and the part of the result that shows it."""


def churn(asked: Asked) -> dict[str, Any]:
    """Replay one graph 10,000 times with all operands changed between the replays; compare each result on the card."""
    # Replays, and the share of the seconds.
    cases = {(16, "fp8", "bf16", 64): (10_000, 0.5), (16, "bf16", "bf16", 64): (2000, 0.2),
             (128, "fp8", "fp8", 16): (2000, 0.2)}  # fmt: skip
    if asked.dry == dry.LAUNCHES:
        cases = dict.fromkeys(cases, (1, 0.3))
    elif asked.dry:  # what an interpreter does in seconds
        cases = {(2, "fp8", "bf16", 9): (4, 0.5)}
    found, early = dict[str, Any](), list[str]()
    for (heads, kind, weights, tokens), (times, part) in cases.items():
        name = f"{kind} cache, {weights} weights, N{heads}, T{tokens}"
        share = replace(asked, seconds=asked.seconds * part)
        found[name] = replayed(share, shape_of(heads, kind, weights), tokens, times)
        early += [f"{name}: {found[name]['replays']} replays of {times}"] * (found[name]["replays"] < times)
    wrong = any(one["wrong"] for one in found.values())
    if asked.dry == dry.LAUNCHES:
        return seen_as_nothing(found, wrong)
    share, small = replace(asked, seconds=asked.seconds / 30), shape_of(2, "fp8", "bf16")
    few = 4 if asked.dry else 400
    caught = {
        f"a graph keeps {name}": part in replayed(share, small, 9, few, name)["wrong"] for name, part in HELD.items()
    }
    return found | {"planted": caught, "stopped": "; ".join(early), "ok": not wrong}


def replayed(asked: Asked, shape: LayerShape, tokens: int, times: int, held: str = "") -> dict[str, Any]:
    """Replay a graph of one call; return how much is wrong in which part of the result, over all replays.

    The cache and the rotated half are right to the byte, as docs/kernels.md says. The latent half holds sums in another
    order: no value may be more than a step off, and over plain weights few values a step. The counts stay on the
    device, so no replay waits for the host. ``held`` names an operand that the graph keeps.
    """
    since, home = time.monotonic(), shape.device
    inputs = synthetic_inputs(shape, tokens, padded=None)
    blocks = max(4, -(-4 * tokens // BLOCK))  # more slots than rows, so that a stale write lands where it shows
    cache = inputs.kv_cache.new_empty((blocks, *inputs.kv_cache.shape[1:]))
    cache.view(torch.uint8).fill_(0x35)
    inputs = replace(inputs, kv_cache=cache)
    kept: list[torch.Tensor] = []
    bound = TritonBackend().bind(captured := _held(inputs, held))
    assert not isinstance(bound, str), bound
    bound.run(captured)
    card().synchronize()
    twin = replace(inputs, kv_cache=cache.clone())
    graph = card().capture(lambda: kept.append(bound.run(captured)), card().new_pool(), False)
    graph.instantiate()
    names = ("cache", "rotated", "latent", "nan")
    counts = dict.fromkeys((*names, "latent a step off"), torch.zeros((), dtype=torch.int64, device=home))
    done, query, bounds = 0, kept[-1], TritonBackend.bounds
    for done in range(1, times + 1):
        _change(inputs, done, every=2 if asked.dry else 100)
        query.view(torch.uint8).fill_(0xFF)  # a NaN in each type: a row that nobody writes shows
        graph.replay()
        wanted = reference.prepare(twin, reference.TRITON)
        steps = _steps(query[..., :LATENT], wanted[..., :LATENT], bounds.slack)
        found = {
            "cache": _differing_bytes(cache, twin.kv_cache),
            "rotated": _differing_bytes(query[..., LATENT:], wanted[..., LATENT:]),
            "latent": (steps > bounds.nope_steps).sum(),
            "latent a step off": (steps == bounds.nope_steps).sum(),
            "nan": query.float().isnan().sum(),
        }
        counts = {name: counts[name] + count for name, count in found.items()}
        if not asked.left(since):
            break
    card().synchronize()
    figures = {name: int(count) for name, count in counts.items()}
    wrong = [name for name in names if figures[name]]
    # Over codes one tie moves a whole row of products.
    share = 1.0 if inputs.weight.product_bound else bounds.nope_share
    if figures["latent a step off"] > share * query[..., :LATENT].numel() * done:
        wrong.append("latent a step off")
    return figures | {"replays": done, "wrong": wrong}


def _held(inputs: DecodeInputs, name: str) -> DecodeInputs:
    if name == "weight":
        return replace(inputs, weight=replace(inputs.weight, values=inputs.weight.values.clone()))
    return replace(inputs, **{name: getattr(inputs, name).clone()}) if name else inputs


def _change(inputs: DecodeInputs, step: int, every: int) -> None:
    """Give every operand new values in place; weights, scales and the rotary table at each ``every``th step."""
    for rows in (inputs.q, inputs.k_pe, inputs.kv_c):
        rows.normal_()
    slots = torch.randperm(inputs.kv_cache.shape[0] * BLOCK, device=inputs.q.device)[: inputs.num_tokens]
    inputs.slot_mapping.copy_(torch.where(torch.rand_like(slots, dtype=torch.float32) < 0.1, -1, slots))
    inputs.positions.random_(0, inputs.cos_sin_cache.shape[0])
    if step % every == 0:
        weight = inputs.weight.values.view(torch.uint8 if inputs.weight.scale is not None else inputs.q.dtype)
        weight.copy_(weight.roll(1, dims=0) if weight.shape[0] > 1 else weight.flip(-1))
        inputs.cos_sin_cache.copy_(inputs.cos_sin_cache.flip(0))
        for scale in (inputs.k_scale, inputs.q_scale):
            scale.mul_(1.25 if step // every % 2 else 0.8)


def _differing_bytes(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (got.contiguous().view(torch.uint8) != wanted.contiguous().view(torch.uint8)).sum()


def _steps(got: torch.Tensor, wanted: torch.Tensor, slack: float) -> torch.Tensor:
    """Return how many representable steps each value is from the wanted one; 0 within ``slack``, as ``difference``."""
    near = (got.float() - wanted.float()).abs() <= slack * wanted.float().abs().max()
    return torch.where(near, 0, (ordinals(got) - ordinals(wanted)).abs())
