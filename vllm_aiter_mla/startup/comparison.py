# SPDX-License-Identifier: Apache-2.0
"""Run a back end on synthetic rows and compare it with the reference, before the first graph is captured.

This project has measured nothing about AITER, and infers two facts about its rounding from the source. Because of the
self-check, every start-up verifies them on the user's own card.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.backend import Bounds, KernelBackend
from vllm_aiter_mla.kernels.inputs import PADDED, DecodeInputs, LayerShape, synthetic_inputs

PARTS: dict[str, Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
    "q nope": lambda query, rows, latent: query[..., :latent],
    "q rope": lambda query, rows, latent: query[..., latent:],
    "kv nope": lambda query, rows, latent: rows[:, :latent],
    "kv rope": lambda query, rows, latent: rows[:, latent:],
}
"""What is compared, of the prepared query [T, N, L+R], the n written KV rows [n, L+R], and L."""
STRAY = "stray bytes"
OVERFLOW_FACTOR = 64.0  # of N(0, 1) over the synthetic scales: most of a row is then beyond fp8's range


@dataclass(frozen=True, slots=True)
class Difference:
    """Distance of one tensor part from the reference: largest step and share of elements that differ."""

    steps: int
    share: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a back end compares with the reference."""

    ok: bool  # agreement within the bounds
    message: str  # one line with the figures, fit for a log
    differences: dict[str, Difference]  # by part ("q nope", "q rope", "kv nope", "kv rope")
    stray_bytes: int  # bytes changed outside the written rows, in front of the cache and behind it included
    wrong: tuple[str, ...] = ()  # which of ``PARTS`` and ``STRAY`` are out of bounds
    # Whether values beyond fp8's range became NaN, as in AITER's sources, and not the largest value
    writes_nan: bool = False


def compare_with_reference(backend: KernelBackend, shape: LayerShape, limit: int | None = None) -> Comparison:
    """Warm ``backend`` up and compare it with the reference on synthetic rows; a disagreement does not raise.

    Call it on every rank, outside graph capture; it synchronises with the device. Each kernel of the back end that a
    batch of up to ``limit`` rows reaches is checked, one batch each, over each cache that it may meet. So is the kernel
    of ``inputs.TOKENS`` rows, whatever the limit. Batches that it declines are left out; one that declines them all has
    failed. If the weight format has a bound for its product, the rest is compared with the reference over the kernel's
    own product.

    Args:
        backend: what is checked.
        shape: the layer.
        limit: the decode limit in tokens; None: any.

    Returns:
        The first result that failed; otherwise the last one that wrote NaN; otherwise the first one.

    Raises:
        KernelCaptureError: called inside a capture.
    """
    one = synthetic_inputs(shape, tokens=1)
    one.slot_mapping.fill_(-1)  # loads or compiles the module, and writes nothing to the cache
    if backend.refuse(one) is None:
        backend.prepare(one)
    result, seen, declined = None, set(), ""
    for large in backend.caches:
        few = synthetic_inputs(shape, large=large)
        counts = sorted({min(count, limit or count) for count in backend.tried_counts(few)})
        for tokens in (few.num_tokens, *counts):
            # The only row of a batch needs a slot: otherwise no KV row is written.
            inputs = synthetic_inputs(shape, tokens, padded=PADDED if tokens > 1 else None, large=large)
            if (reason := backend.refuse(inputs)) is not None:
                declined = declined or reason
                continue
            kernel = (backend.kernel_of(inputs), large)
            if kernel in seen:
                continue
            seen.add(kernel)
            of_batch = _compare_batch(backend, inputs)
            if not of_batch.ok:
                return of_batch
            result = of_batch if result is None or of_batch.writes_nan else result
    return result or Comparison(False, f"{backend.name}: refused the self-check: {declined}", {}, 0)


def _compare_batch(backend: KernelBackend, inputs: DecodeInputs) -> Comparison:
    """Compare one batch: the absorb product, if it can be had on its own, then query and cache."""
    product = backend.absorbed(inputs) if inputs.weight.product_bound else None
    error = 0.0 if product is None else deviation(product, inputs.weight.reference(inputs.q_nope))
    if error > inputs.weight.product_bound:
        message = f"{backend.name}: self-check FAILED: its absorb product is {error:.2%} off"
        return Comparison(False, message, {}, 0)
    _overflow(inputs)
    before = _storage(inputs.kv_cache).clone()
    q_out = backend.prepare(inputs)
    stray = stray_bytes(inputs, before)
    results = []
    # By its source, AITER's op truncates a bf16 cache's rope part on gfx942, and overflows. Better is accepted as well.
    for numerics in backend.numerics(inputs).accepted():
        twin = replace(inputs, kv_cache=_like(before.clone(), inputs.kv_cache))
        expected = reference.prepare(twin, numerics, product)
        # A product inside the launch cannot be compared on its own: its bound then applies to the query.
        query_bound = inputs.weight.product_bound if product is None else 0.0
        results.append(_compare(backend, inputs, q_out, twin, expected, query_bound, stray))
        if results[-1].ok:
            return results[-1]
    return results[0]


def _compare(
    backend: KernelBackend,
    inputs: DecodeInputs,
    q_out: torch.Tensor,
    twin: DecodeInputs,
    expected: torch.Tensor,
    query_bound: float,
    stray: int,
) -> Comparison:
    """Compare a query, and the rows of a cache, with those of the reference, which has written to that of ``twin``.

    Args:
        backend: what is compared; its bounds count.
        inputs: what it was given, with the cache that it has written to.
        q_out: what it returned.
        twin: the same with a cache of its own.
        expected: the reference's query.
        query_bound: how far the un-rotated query may be off as a whole, where it holds a product; 0 where not.
        stray: bytes that changed outside the written rows.
    """
    if q_out.shape[1] in (inputs.num_heads, inputs.out_heads):
        q_out, expected = inputs.real_heads(q_out), inputs.real_heads(expected)
    if q_out.shape != expected.shape or q_out.dtype != expected.dtype:
        given, wanted = (f"{list(t.shape)} {t.dtype}" for t in (q_out, expected))
        return Comparison(False, f"{backend.name}: returned {given}, expected {wanted}", {}, 0)
    bounds, latent = backend.bounds, inputs.latent_dim
    written = inputs.slot_mapping[inputs.slot_mapping >= 0]
    got_rows, wanted_rows = (operands.kv_cache.flatten(0, 1)[written] for operands in (inputs, twin))
    if not written.numel():
        return Comparison(False, f"{backend.name}: self-check FAILED: no row to compare", {}, 0)
    parts = {name: (part(q_out, got_rows, latent), part(expected, wanted_rows, latent)) for name, part in PARTS.items()}
    differences = {name: difference(*pair, slack=bounds.slack * (name == "q nope")) for name, pair in parts.items()}
    wrong = tuple(
        name for name, found in differences.items()
        if not _within(found, bounds, rotated="rope" in name, elements=parts[name][0].numel())
    )  # fmt: skip
    if wrong == ("q nope",) and deviation(*parts["q nope"]) <= query_bound:
        wrong = ()
    wrong += (STRAY,) * bool(stray)
    figures = ", ".join(f"{name} {d.steps} step(s) on {d.share:.2%}" for name, d in differences.items())
    message = f"{backend.name}: self-check {'FAILED' if wrong else 'passed'}: {figures}, {stray} {STRAY}"
    writes_nan = any(bool(got.float().isnan().any()) for got, _ in parts.values())
    return Comparison(not wrong, message, differences, stray, wrong, writes_nan)


def _within(found: Difference, bounds: Bounds, rotated: bool, elements: int) -> bool:
    """Return whether a part agrees with the reference; the share of differing elements counts for rotated ones.

    One element of a part may differ however few the part has: a single KV row has 64 rotated ones.
    """
    if rotated:
        return found.steps <= bounds.rope_steps and found.share <= max(bounds.rope_share, 1 / elements)
    return found.steps <= bounds.nope_steps


def stray_bytes(inputs: DecodeInputs, before: torch.Tensor) -> int:
    """Return how many bytes of the cache's storage changed outside the rows that have a slot.

    Args:
        inputs: after the call.
        before: the storage as it was, [bytes] uint8.
    """
    changed = _storage(inputs.kv_cache) != before
    rows = _like(changed, inputs.kv_cache).flatten(0, 1)
    rows[inputs.slot_mapping[inputs.slot_mapping >= 0]] = False
    return int(changed.sum())


def _storage(cache: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a cache as [bytes] uint8: another layer's blocks lie in it too."""
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())


def _like(storage: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Return the part of a storage where a contiguous cache lies, with its shape; of its dtype, or of a bool a byte."""
    start = cache.storage_offset() * cache.itemsize
    part = storage[start : start + cache.numel() * cache.itemsize]
    shape = (*cache.shape[:2], -1)
    return part.view(shape) if storage.dtype == torch.bool else part.view(cache.dtype).view(shape)


def _overflow(inputs: DecodeInputs) -> None:
    """Put a row beyond fp8's range: all but its un-rotated query, whose size the bounds of a product depend on."""
    inputs.q[0, :, inputs.nope_dim :] *= OVERFLOW_FACTOR
    inputs.k_pe[0] *= OVERFLOW_FACTOR
    inputs.kv_c[0] *= OVERFLOW_FACTOR


def difference(a: torch.Tensor, b: torch.Tensor, slack: float = 0.0) -> Difference:
    """Return the largest distance in representable values, and the share of elements that differ, of equal dtypes.

    Differences up to ``slack`` times the largest magnitude in ``b`` do not count.
    """
    if not a.numel():
        return Difference(0, 0.0)
    steps = (ordinals(a) - ordinals(b)).abs()
    if slack:
        near = (a.float() - b.float()).abs() <= slack * b.float().abs().max()
        steps = torch.where(near, 0, steps)
    return Difference(int(steps.max()), float((steps > 0).double().mean()))


def deviation(product: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ||product - expected|| / ||expected||; infinite if shape or dtype differ, or the result is NaN."""
    if product.shape != expected.shape or product.dtype != expected.dtype:
        return float("inf")
    distance = (product.float() - expected.float()).norm() / expected.float().norm()
    return float("inf") if distance.isnan() else float(distance)


def ordinals(x: torch.Tensor) -> torch.Tensor:
    """Map floating-point values to integers so that neighbours differ by one. int64, same shape; NaNs are all equal."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[x.itemsize]
    raw = x.contiguous().view(integer).to(torch.int64)
    magnitude = raw & torch.iinfo(integer).max
    signed = torch.where(raw < 0, -magnitude, magnitude)
    return torch.where(x.float().isnan(), 1 << 40, signed)
