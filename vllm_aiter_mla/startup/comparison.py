# SPDX-License-Identifier: Apache-2.0
"""Run a back end on synthetic rows and compare it with the reference, before the first graph is captured.

This project has measured nothing about AITER, and infers two facts about its rounding from the source: on gfx942 its
op truncates the rotated part of a bf16 cache, and an fp8 overflow becomes NaN. Every start compares AITER with them on
the user's own card; a build that rounds or saturates, as vLLM does, is accepted too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.backend import Bounds, KernelBackend
from vllm_aiter_mla.kernels.distance import Difference, difference, why_off
from vllm_aiter_mla.kernels.inputs import OVERFLOW_FACTOR, PADDED, DecodeInputs, LayerShape, synthetic_inputs

ROTARY_STYLES = (False, True)
"""Rotary styles that a start checks, as ``is_neox``. Only a layer's graph, which is compiled later, shows its style."""
PARTS: dict[str, Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
    "q nope": lambda query, rows, latent: query[..., :latent],
    "q rope": lambda query, rows, latent: query[..., latent:],
    "kv nope": lambda query, rows, latent: rows[:, :latent],
    "kv rope": lambda query, rows, latent: rows[:, latent:],
}
"""The parts that are compared. Each takes the prepared query [T, N, L+R], the n written KV rows [n, L+R], and L."""
STRAY = "stray bytes"


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a back end compares with the reference."""

    ok: bool  # whether they agree within the bounds
    message: str  # one line with the figures, fit for a log
    differences: dict[str, Difference] = field(default_factory=dict)  # by part of ``PARTS``; empty if none was compared
    stray_bytes: int = 0  # bytes changed outside the written rows, in front of the cache and behind it included
    wrong: tuple[str, ...] = ()  # which of ``PARTS`` and ``STRAY`` are out of bounds
    # Whether values beyond fp8's range became NaN, as in AITER's sources, and not the largest value
    writes_nan: bool = False


class KernelOutput(NamedTuple):
    """The result of one call."""

    query: torch.Tensor  # [T, N, L+R], or [T, M, L+R] as in ``DecodeInputs.new_query``
    inputs: DecodeInputs  # the operands, with the cache that the call has written to


def compare_with_reference(backend: KernelBackend, shape: LayerShape, limit: int) -> Comparison:
    """Warm ``backend`` up and compare it with the reference on synthetic rows; a disagreement does not raise.

    Call it on every rank, outside graph capture; it synchronises with the device. It checks each kernel of the back end
    that a batch of up to ``limit`` rows reaches, with one batch over each cache that the kernel may meet. It checks the
    kernel of ``inputs.TOKENS`` rows whatever the limit. A back end that declines each of these batches has failed.
    If the weight format has a bound for its product, the product is compared by its norm, and the rest with the
    reference over the kernel's own product.

    Args:
        backend: what is checked.
        shape: the layer.
        limit: the decode limit in tokens.

    Returns:
        The first result that failed; otherwise the first one in which NaN was written; otherwise the first one.

    Raises:
        KernelCaptureError: called inside a capture.
    """
    _run_one_row(backend, shape)
    results: list[Comparison] = []
    for inputs in _one_batch_per_kernel(backend, shape, limit):
        results.append(_compare_batch(backend, inputs))
        if not results[-1].ok:
            return results[-1]
    if not results:
        reason = backend.refuse(synthetic_inputs(shape, large=backend.caches[0]))
        return Comparison(False, f"{backend.name}: self-check FAILED: it takes no batch: {reason}")
    return next((result for result in results if result.writes_nan), results[0])


def _run_one_row(backend: KernelBackend, shape: LayerShape) -> None:
    """Load or compile the back end's module by a call of one row that writes nothing to the cache."""
    row = synthetic_inputs(shape, tokens=1)
    row.slot_mapping.fill_(-1)
    if backend.refuse(row) is None:
        backend.prepare(row)


def _one_batch_per_kernel(backend: KernelBackend, shape: LayerShape, limit: int) -> Iterator[DecodeInputs]:
    """Yield one batch for each kernel of the back end, over each cache that it may meet."""
    for large in backend.caches:
        seen: set[str | None] = set()
        batch = synthetic_inputs(shape, large=large)
        counts = sorted({min(count, limit) for count in backend.tried_counts(batch)})
        for tokens in (batch.num_tokens, *counts):
            # The only row of a batch needs a slot: otherwise no KV row is written.
            inputs = synthetic_inputs(shape, tokens, padded=PADDED if tokens > 1 else None, large=large)
            if backend.refuse(inputs) is None and (kernel := backend.kernel_of(inputs)) not in seen:
                seen.add(kernel)
                yield inputs


def _compare_batch(backend: KernelBackend, inputs: DecodeInputs) -> Comparison:
    """Compare one batch: the absorb product, if the kernel makes it before its launch, then the query and the cache."""
    product = backend.absorbed(inputs) if inputs.weight.product_bound else None
    if product is not None:
        expected = inputs.weight.reference(inputs.q_nope)
        if off := why_off(product, expected, inputs.weight.product_bound):
            return Comparison(False, f"{backend.name}: self-check FAILED: its absorb product is {off}")
    _overflow_first_row(inputs)
    before = _storage(inputs.kv_cache).clone()
    got = KernelOutput(backend.prepare(inputs), inputs)
    stray = stray_bytes(inputs, before)
    results = []
    # According to its source, AITER's op truncates a bf16 cache's rope part on gfx942 and turns an overflow into NaN. A
    # build that rounds, or saturates, is accepted as well.
    for numerics in backend.numerics(inputs).accepted():
        reference_inputs = replace(inputs, kv_cache=_view_as_cache(before.clone(), inputs.kv_cache))
        wanted = KernelOutput(reference.prepare(reference_inputs, numerics, product), reference_inputs)
        # A product inside the launch cannot be compared before the query: its bound then applies to the query.
        query_bound = inputs.weight.product_bound if product is None else 0.0
        results.append(_compare(backend, got, wanted, query_bound, stray))
        if results[-1].ok:
            return results[-1]
    return results[0]


def _compare(
    backend: KernelBackend, got: KernelOutput, wanted: KernelOutput, query_bound: float, stray: int
) -> Comparison:
    """Compare the query and the written KV rows of a call with those of the reference.

    Args:
        backend: the back end that is compared, whose bounds count.
        got: the result of the back end.
        wanted: the result of the reference on the same operands with another cache.
        query_bound: how far the un-rotated query may be off by its norm, where it holds a product; 0 where not.
        stray: bytes that changed outside the written rows.
    """
    (q_out, inputs), (expected, reference_inputs) = got, wanted
    if q_out.shape[1] in (inputs.num_heads, inputs.out_heads):
        q_out, expected = inputs.real_heads(q_out), inputs.real_heads(expected)
    if q_out.shape != expected.shape or q_out.dtype != expected.dtype:
        given, due = (f"{list(t.shape)} {t.dtype}" for t in (q_out, expected))
        return Comparison(False, f"{backend.name}: returned {given}, expected {due}")
    bounds, latent = backend.bounds, inputs.latent_dim
    written = inputs.slot_mapping[inputs.slot_mapping >= 0]
    got_rows, wanted_rows = (operands.kv_cache.flatten(0, 1)[written] for operands in (inputs, reference_inputs))
    if not written.numel():
        return Comparison(False, f"{backend.name}: self-check FAILED: no row to compare")
    parts = {name: (part(q_out, got_rows, latent), part(expected, wanted_rows, latent)) for name, part in PARTS.items()}
    differences = {name: difference(*pair, slack=bounds.slack * (name == "q nope")) for name, pair in parts.items()}
    wrong = tuple(
        name for name, found in differences.items()
        if not _within(found, bounds, rotated="rope" in name, elements=parts[name][0].numel())
    )  # fmt: skip
    if wrong == ("q nope",) and query_bound and not why_off(*parts["q nope"], query_bound):
        wrong = ()
    wrong += (STRAY,) * bool(stray)
    figures = ", ".join(f"{name} {d.steps} step(s) on {d.share:.2%}" for name, d in differences.items())
    message = f"{backend.name}: self-check {'FAILED' if wrong else 'passed'}: {figures}, {stray} {STRAY}"
    writes_nan = any(bool(ours.float().isnan().any()) for ours, _ in parts.values())
    return Comparison(not wrong, message, differences, stray, wrong, writes_nan)


def _within(found: Difference, bounds: Bounds, rotated: bool, elements: int) -> bool:
    """Return whether a part agrees with the reference; the share of differing elements counts for rotated ones.

    One element may differ even if it is more than that share of its part: a single KV row has 64 rotated elements.
    """
    if rotated:
        return found.steps <= bounds.rope_steps and found.share <= max(bounds.rope_share, 1 / elements)
    return found.steps <= bounds.nope_steps


def stray_bytes(inputs: DecodeInputs, before: torch.Tensor) -> int:
    """Return how many bytes of the cache's storage changed outside the rows that have a slot.

    Args:
        inputs: the operands after the call.
        before: the cache's storage before the call, [bytes] uint8.
    """
    changed = _storage(inputs.kv_cache) != before
    rows = _view_as_cache(changed, inputs.kv_cache).flatten(0, 1)
    rows[inputs.slot_mapping[inputs.slot_mapping >= 0]] = False
    return int(changed.sum())


def _storage(cache: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a cache as [bytes] uint8: another layer's blocks lie in it too."""
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())


def _view_as_cache(storage: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Return the part of a storage where a contiguous cache lies, in the cache's shape.

    A uint8 storage is viewed as the cache's dtype. A bool storage, which has one element a byte, stays one.
    """
    start = cache.storage_offset() * cache.itemsize
    part = storage[start : start + cache.numel() * cache.itemsize]
    shape = (*cache.shape[:2], -1)
    return part.view(shape) if storage.dtype == torch.bool else part.view(cache.dtype).view(shape)


def _overflow_first_row(inputs: DecodeInputs) -> None:
    """Put a row beyond fp8's range: all but its un-rotated query, on whose size the bounds of a product depend."""
    inputs.q[0, :, inputs.nope_dim :] *= OVERFLOW_FACTOR
    inputs.k_pe[0] *= OVERFLOW_FACTOR
    inputs.kv_c[0] *= OVERFLOW_FACTOR
