# SPDX-License-Identifier: Apache-2.0
"""Run a back end on synthetic rows and compare it with the reference, before the first graph is captured.

Two facts about AITER's rounding are inferred from its source: on gfx942 its op truncates the rotated part of a bf16
cache, and an fp8 overflow becomes NaN. Every start compares AITER with these two facts on the user's own card. A build
that rounds or saturates, as vLLM does, is accepted too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.backend import Bounds, KernelBackend
from vllm_aiter_mla.kernels.distance import ROW_BOUNDS, Difference, difference, is_within, norm_bound, why_off
from vllm_aiter_mla.kernels.inputs import (
    GUARD_ROWS,
    OVERFLOW_FACTOR,
    PADDED,
    PATTERN,
    DecodeInputs,
    GuardedInputs,
    LayerShape,
    synthetic_inputs,
    with_guards,
)

ROTARY_STYLES = (False, True)
"""Rotary styles that a start checks, as ``is_neox``. Only the graph of a layer, which is compiled later, shows its
style."""
PARTS: dict[str, Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
    "q nope": lambda query, rows, latent: query[..., :latent],
    "q rope": lambda query, rows, latent: query[..., latent:],
    "kv nope": lambda query, rows, latent: rows[:, :latent],
    "kv rope": lambda query, rows, latent: rows[:, latent:],
}
"""The parts that are compared. Each takes the prepared query [T, N, L+R], the n written KV rows [n, L+R], and L."""
STRAY_BYTES = "stray bytes"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison of a back end with the reference."""

    has_passed: bool  # whether the back end agrees with the reference within the bounds
    message: str  # one line with the figures, for the log
    differences: dict[str, Difference] = field(default_factory=dict)  # by name of a part; empty if nothing was compared
    # Bytes changed outside the written rows and the query, also in front of the cache and the query, and behind them
    num_stray_bytes: int = 0
    failed_parts: tuple[str, ...] = ()  # which of ``PARTS`` and ``STRAY_BYTES`` are out of bounds
    # Whether values beyond fp8's range became NaN, as in AITER's sources, instead of the largest value
    writes_nan: bool = False


class KernelOutput(NamedTuple):
    """The prepared query and the written cache after one call of a kernel, or of the reference."""

    query: torch.Tensor  # [T, N, L+R], or [T, M, L+R] as in ``DecodeInputs.new_query``
    inputs: DecodeInputs  # the operands, with the cache that the call has written to


class FilledInputs(GuardedInputs):
    """Operands whose prepared query and its guards hold ``PATTERN`` before the call."""

    __slots__ = ()

    def new_query(self, padded: bool = True) -> torch.Tensor:
        """See the base class."""
        query = GuardedInputs.new_query(self, padded)
        with_guards(query).view(torch.uint8).fill_(PATTERN)
        return query


def compare_with_reference(backend: KernelBackend, shape: LayerShape, limit: int) -> Comparison:
    """Warm ``backend`` up and compare it with the reference on synthetic rows; a disagreement does not raise.

    Call this function on every rank, outside graph capture. It synchronises with the device. It checks each kernel of
    the back end that a batch of up to ``limit`` rows reaches, with one batch over each cache that the kernel may meet.
    It checks the kernel of ``inputs.TOKENS`` rows whatever the limit. A back end that declines all these batches has
    failed. If the weight format has a bound for its product, the product is compared by its norm. The other values are
    then compared with the reference over the kernel's own product.

    Args:
        backend: the back end to check.
        shape: the layer.
        limit: the decode limit in tokens.

    Returns:
        The first comparison that failed. If all passed: the first in which the kernel wrote NaN, else the first.

    Raises:
        KernelCaptureError: the function was called inside a capture.
    """
    _run_one_row(backend, shape)
    results: list[Comparison] = []
    for inputs in _batch_per_kernel(backend, shape, limit):
        results.append(_compare_batch(backend, inputs))
        if not results[-1].has_passed:
            return results[-1]
    if not results:
        reason = backend.refuse(synthetic_inputs(shape, large=backend.caches[0]))
        return Comparison(False, f"{backend.name}: self-check FAILED: it takes no batch: {reason}")
    return next((result for result in results if result.writes_nan), results[0])


def _run_one_row(backend: KernelBackend, shape: LayerShape) -> None:
    """Load or compile the back end's module: call it with one row and no slot, so that it writes nothing."""
    row = synthetic_inputs(shape, tokens=1)
    row.slot_mapping.fill_(-1)
    if backend.refuse(row) is None:
        backend.prepare(row)


def _batch_per_kernel(backend: KernelBackend, shape: LayerShape, limit: int) -> Iterator[DecodeInputs]:
    """Yield one batch for each kernel of the back end, over each cache that the kernel may meet."""
    for large in backend.caches:
        covered_kernels: set[str | None] = set()
        batch = synthetic_inputs(shape, large=large)
        token_counts = {batch.num_tokens, *(min(count, limit) for count in backend.tried_counts(batch))}
        # The largest first: a kernel's second block of rows lies beyond the few rows of a batch for all kernels.
        for tokens in sorted(token_counts, reverse=True):
            # The only row of a batch needs a slot: otherwise no KV row is written.
            inputs = synthetic_inputs(shape, tokens, padded=PADDED if tokens > 1 else None, large=large)
            if backend.refuse(inputs) is None and (kernel := backend.kernel_of(inputs)) not in covered_kernels:
                covered_kernels.add(kernel)
                yield inputs


def _compare_batch(backend: KernelBackend, inputs: DecodeInputs) -> Comparison:
    """Compare the query and the cache of one batch with the reference.

    If the kernel makes the absorb product before its launch, the product is compared first.
    """
    _overflow_first_row(inputs)
    inputs = FilledInputs.of(inputs)
    product = backend.absorbed(inputs) if inputs.weight.product_bound else None
    if product is not None:
        reference_product = inputs.weight.reference(inputs.q_nope)
        for rows, factor in _row_groups(product):
            if reason := why_off(product[rows], reference_product[rows], factor * inputs.weight.product_bound):
                return Comparison(False, f"{backend.name}: self-check FAILED: its absorb product is {reason}")
    bound = backend.bind(inputs)
    assert not isinstance(bound, str), bound  # such a batch was not yielded
    storage_before = _storage(inputs.kv_cache).clone()
    # What serves, and what graphs hold, is a later call: the first one may compile, and be launched in another way.
    bound.run(inputs)
    _storage(inputs.kv_cache).copy_(storage_before)
    actual = KernelOutput(bound.run(inputs), inputs)
    num_stray_bytes = count_stray_bytes(actual, storage_before)
    results = []
    # A build of AITER may truncate and write NaN, as its sources say, or round and saturate: both are accepted.
    for numerics in backend.numerics(inputs).accepted():
        reference_inputs = replace(inputs, kv_cache=_view_as_cache(storage_before.clone(), inputs.kv_cache))
        expected = KernelOutput(reference.prepare(reference_inputs, numerics, product), reference_inputs)
        # A product inside the launch cannot be compared before the query: its bound then applies to the query.
        query_bound = inputs.weight.product_bound if product is None else 0.0
        results.append(_compare(backend, actual, expected, query_bound, num_stray_bytes))
        if results[-1].has_passed:
            return results[-1]
    return results[0]


def _compare(
    backend: KernelBackend, actual: KernelOutput, expected: KernelOutput, query_bound: float, num_stray_bytes: int
) -> Comparison:
    """Compare the query and the written KV rows of a call with those of the reference.

    Args:
        backend: the back end that is compared; its bounds apply.
        actual: the result of the back end.
        expected: the result of the reference on the same operands with another cache.
        query_bound: how far the un-rotated query may be off by its norm if it holds a product, else 0.
        num_stray_bytes: bytes that changed outside the written rows.
    """
    inputs, actual_query, expected_query = actual.inputs, actual.query, expected.query
    if actual_query.shape[1] in (inputs.num_heads, inputs.out_heads):
        actual_query, expected_query = inputs.real_heads(actual_query), inputs.real_heads(expected_query)
    if actual_query.shape != expected_query.shape or actual_query.dtype != expected_query.dtype:
        signatures = [f"{list(query.shape)} {query.dtype}" for query in (actual_query, expected_query)]
        failure = f"it returned {signatures[0]}, expected {signatures[1]}"
        return Comparison(False, f"{backend.name}: self-check FAILED: {failure}")
    slots = inputs.slot_mapping[inputs.slot_mapping >= 0]
    if not slots.numel():
        return Comparison(False, f"{backend.name}: self-check FAILED: no row to compare")
    actual_rows, expected_rows = (output.inputs.kv_cache.flatten(0, 1)[slots] for output in (actual, expected))
    pairs = {
        name: (
            part(actual_query, actual_rows, inputs.latent_dim),
            part(expected_query, expected_rows, inputs.latent_dim),
        )
        for name, part in PARTS.items()
    }
    differences, failed_parts = _compare_parts(pairs, backend.bounds, query_bound)
    if num_stray_bytes:
        failed_parts = (*failed_parts, STRAY_BYTES)
    figures = ", ".join(
        f"{name} {part_difference.steps} step(s) on {part_difference.share:.2%}"
        for name, part_difference in differences.items()
    )
    outcome_text = f"self-check {'FAILED' if failed_parts else 'passed'}"
    message = f"{backend.name}: {outcome_text}: {figures}, {num_stray_bytes} {STRAY_BYTES}"
    writes_nan = any(bool(actual_part.float().isnan().any()) for actual_part, _ in pairs.values())
    return Comparison(not failed_parts, message, differences, num_stray_bytes, failed_parts, writes_nan)


def _compare_parts(
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], bounds: Bounds, query_bound: float
) -> tuple[dict[str, Difference], tuple[str, ...]]:
    """Return the difference of each part, and the parts that are out of bounds.

    Args:
        pairs: the actual and the expected tensor, by name of ``PARTS``.
        bounds: of the back end.
        query_bound: see ``_compare``.
    """
    differences, failed_parts = dict[str, Difference](), list[str]()
    for name, (actual_part, expected_part) in pairs.items():
        if name == "q nope":
            differences[name], is_right = _compare_product(actual_part, expected_part, bounds, query_bound)
        else:
            differences[name] = difference(actual_part, expected_part)
            # The un-rotated part of a KV row is no product: it is right to the bit.
            max_steps, max_share = (bounds.rope_steps, bounds.rope_share) if "rope" in name else (0, 0.0)
            is_right = is_within(differences[name], max_steps, max_share, actual_part.numel())
        if not is_right:
            failed_parts.append(name)
    return differences, tuple(failed_parts)


def _compare_product(
    actual: torch.Tensor, expected: torch.Tensor, bounds: Bounds, query_bound: float
) -> tuple[Difference, bool]:
    """Return the difference of the un-rotated query [T, N, L], and whether it is within bounds.

    A product over codes may have rows that are more than a step off, if it is close by its norm.
    """
    largest, num_differing, is_right = 0, 0.0, True
    for rows, factor in _row_groups(actual):
        got, wanted, bound = actual[rows], expected[rows], factor * query_bound
        found, elements = difference(got, wanted, slack=bounds.slack), got.numel()
        largest, num_differing = max(largest, found.steps), num_differing + found.share * elements
        if bound:
            is_close = found.steps <= bounds.nope_steps or not why_off(got, wanted, bound)
            is_right &= is_close and not why_off(got, wanted, norm_bound(bound, got.dtype))
        else:
            is_right &= is_within(found, bounds.nope_steps, bounds.nope_share, elements)
    return Difference(largest, num_differing / actual.numel()), is_right


def count_stray_bytes(actual: KernelOutput, storage_before: torch.Tensor) -> int:
    """Return how many bytes a call changed around the query, and in the cache's storage outside rows that have a slot.

    Args:
        actual: the operands after the call and the query, whose guards were filled as in ``FilledInputs``.
        storage_before: the cache's storage before the call, [bytes] uint8.
    """
    inputs, whole = actual.inputs, with_guards(actual.query)
    guards = [] if whole is actual.query else [whole[:GUARD_ROWS], whole[-GUARD_ROWS:]]
    num_around_query = sum(int((guard.view(torch.uint8) != PATTERN).sum()) for guard in guards)
    is_changed = _storage(inputs.kv_cache) != storage_before
    rows = _view_as_cache(is_changed, inputs.kv_cache).flatten(0, 1)
    rows[inputs.slot_mapping[inputs.slot_mapping >= 0]] = False
    return num_around_query + int(is_changed.sum())


def _storage(cache: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a cache as [bytes] uint8; the storage also holds blocks of other layers."""
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())


def _view_as_cache(storage: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Return the part of a storage where a contiguous cache lies, in the cache's shape.

    A uint8 storage is viewed as the cache's dtype. A bool storage has one element a byte and stays bool.
    """
    start = cache.storage_offset() * cache.itemsize
    cache_bytes = storage[start : start + cache.numel() * cache.itemsize]
    shape = (*cache.shape[:2], -1)
    return cache_bytes.view(shape) if storage.dtype == torch.bool else cache_bytes.view(cache.dtype).view(shape)


def _row_groups(query: torch.Tensor) -> tuple[tuple[slice, int], ...]:
    """Return the row whose un-rotated query is beyond fp8's range, the first of several, and the others.

    They are compared apart: beside the large row the others would look right by any bound that depends on the largest
    value or on the norm. Each has a factor of the bound by norm, which a row by itself may exceed: see ``why_off``.
    """
    return ((slice(0, 1), ROW_BOUNDS), (slice(1, None), 1)) if query.shape[0] > 1 else ((slice(None), 1),)


def _overflow_first_row(inputs: DecodeInputs) -> None:
    """Put the first row beyond fp8's range, but a single row's un-rotated query: that is compared within the range."""
    first_column = 0 if inputs.num_tokens > 1 else inputs.nope_dim
    inputs.q[0, :, first_column:] *= OVERFLOW_FACTOR
    inputs.k_pe[0] *= OVERFLOW_FACTOR
    inputs.kv_c[0] *= OVERFLOW_FACTOR
