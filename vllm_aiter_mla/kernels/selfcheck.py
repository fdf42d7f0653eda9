# SPDX-License-Identifier: Apache-2.0
"""Run a back end on synthetic rows and compare it with the reference, before the first graph is captured.

This project has measured nothing about AITER, and infers two facts about its rounding from the source. Because of the
self-check, every start-up verifies them on the user's own card.
"""

from dataclasses import dataclass, replace

import torch

from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.inputs import DecodeInputs, LayerShape, synthetic_inputs

OVERFLOW = 64.0  # of N(0, 1) over the synthetic scales: most of a row is then beyond fp8's range


@dataclass(frozen=True, slots=True)
class Difference:
    """Distance of one tensor part from the reference: largest step and share of elements that differ."""

    steps: int
    share: float


@dataclass(frozen=True, slots=True)
class SelfCheckResult:
    """Outcome of a self-check."""

    ok: bool  # agreement within the bounds
    message: str  # one line with the figures, fit for a log
    differences: dict[str, Difference]  # by part ("q nope", "q rope", "kv nope", "kv rope")
    stray_bytes: int  # bytes of the cache changed outside the written rows
    # Whether values beyond fp8's range became NaN, as in AITER's sources, and not the largest value
    writes_nan: bool = False


def self_check(backend: KernelBackend, shape: LayerShape, limit: int | None = None) -> SelfCheckResult:
    """Warm ``backend`` up and compare it with the reference on synthetic rows; a disagreement does not raise.

    Call it on every rank, outside graph capture; it synchronises with the device. Each kernel of the back end that a
    batch of up to ``limit`` rows reaches is checked, one batch each, over each cache that it may meet. If the weight
    format has a bound for its product, the rest is compared with the reference over the kernel's own product.

    Args:
        backend: what is checked.
        shape: the layer.
        limit: the decode limit in tokens; None: any.

    Returns:
        The first result that failed; otherwise the last one that wrote NaN; otherwise that of the fewest rows.

    Raises:
        KernelCaptureError: called inside a capture.
    """
    one = synthetic_inputs(shape, tokens=1)
    one.slot_mapping.fill_(-1)  # loads or compiles the module, and writes nothing to the cache
    if backend.refuse(one) is None:
        backend.prepare(one)
    result, seen = None, set()
    for large in backend.caches:
        few = synthetic_inputs(shape, large=large)
        counts = sorted({min(count, limit or count) for count in backend.tried_counts(few)})
        for tokens in (few.num_tokens, *counts):
            inputs = synthetic_inputs(shape, tokens, large=large)
            kernel = (backend.kernel_of(inputs), large)
            if kernel in seen or (result is not None and backend.refuse(inputs) is not None):
                continue
            seen.add(kernel)
            found = _check_once(backend, inputs)
            if not found.ok:
                return found
            result = found if result is None or found.writes_nan else result
    assert result is not None, "a back end tries at least one cache"
    return result


def _check_once(backend: KernelBackend, inputs: DecodeInputs) -> SelfCheckResult:
    reason = backend.refuse(inputs)
    if reason is not None:
        return SelfCheckResult(False, f"{backend.name}: refused the self-check: {reason}", {}, 0)
    product = backend.absorbed(inputs) if inputs.weight.product_bound else None
    off = 0.0 if product is None else deviation(product, inputs.weight.reference(inputs.q_nope))
    if off > inputs.weight.product_bound:
        message = f"{backend.name}: self-check FAILED: its absorb product is {off:.2%} off"
        return SelfCheckResult(False, message, {}, 0)
    _overflow(inputs)
    untouched = inputs.kv_cache.view(torch.uint8).clone()
    q_out = backend.prepare(inputs)
    results = []
    # By its source, AITER's op truncates a bf16 cache's rope part on gfx942, and overflows. Better is accepted as well.
    for numerics in backend.numerics(inputs).accepted():
        twin = replace(inputs, kv_cache=untouched.clone().view(inputs.kv_cache.dtype))
        expected = reference.prepare(twin, numerics, product)
        # A product inside the launch cannot be compared on its own: its bound then applies to the query.
        inside = inputs.weight.product_bound if product is None else 0.0
        results.append(_compare(backend, inputs, q_out, twin, expected, inside))
        if results[-1].ok:
            return results[-1]
    return results[0]


def _compare(
    backend: KernelBackend,
    inputs: DecodeInputs,
    q_out: torch.Tensor,
    twin: DecodeInputs,
    expected: torch.Tensor,
    product_bound: float,
) -> SelfCheckResult:
    if q_out.shape[1] in (inputs.num_heads, inputs.out_heads):
        q_out, expected = inputs.real_heads(q_out), inputs.real_heads(expected)
    if q_out.shape != expected.shape or q_out.dtype != expected.dtype:
        given, wanted = (f"{list(t.shape)} {t.dtype}" for t in (q_out, expected))
        return SelfCheckResult(False, f"{backend.name}: returned {given}, expected {wanted}", {}, 0)
    rows, bounds = backend.defined_rows(inputs), backend.bounds
    written = inputs.slot_mapping[inputs.slot_mapping >= 0]
    cache, expected_cache = (operands.kv_cache.flatten(0, 1) for operands in (inputs, twin))  # [slots, width]
    lat = inputs.latent_dim
    parts = {
        "q nope": (q_out[:rows, :, :lat], expected[:rows, :, :lat]),
        "q rope": (q_out[:rows, :, lat:], expected[:rows, :, lat:]),
        "kv nope": (cache[written, :lat], expected_cache[written, :lat]),
        "kv rope": (cache[written, lat:], expected_cache[written, lat:]),
    }
    differences = {name: difference(*pair, slack=bounds.slack * (name == "q nope")) for name, pair in parts.items()}
    outside = torch.ones(cache.shape[0], dtype=torch.bool, device=cache.device)
    outside[written] = False
    stray = int((cache.view(torch.uint8)[outside] != expected_cache.view(torch.uint8)[outside]).sum())
    most = {"nope": (bounds.nope_steps, 1.0), "rope": (bounds.rope_steps, bounds.rope_share)}
    wrong = {name for name, d in differences.items() if d.steps > most[name[-4:]][0] or d.share > most[name[-4:]][1]}
    if wrong == {"q nope"} and deviation(*parts["q nope"]) <= product_bound:
        wrong = set()
    ok = stray == 0 and not wrong
    figures = ", ".join(f"{name} {d.steps} step(s) on {d.share:.2%}" for name, d in differences.items())
    message = f"{backend.name}: self-check {'passed' if ok else 'FAILED'}: {figures}, {stray} stray bytes"
    writes_nan = any(bool(got.float().isnan().any()) for got, _ in parts.values())
    return SelfCheckResult(ok, message, differences, stray, writes_nan)


def _overflow(inputs: DecodeInputs) -> None:
    """Put a row beyond fp8's range: all but its un-rotated query, whose size the bounds of a product depend on."""
    inputs.q[0, :, inputs.nope_dim :] *= OVERFLOW
    inputs.k_pe[0] *= OVERFLOW
    inputs.kv_c[0] *= OVERFLOW


def difference(a: torch.Tensor, b: torch.Tensor, slack: float = 0.0) -> Difference:
    """Return the largest distance in representable values, and the share of elements that differ, of equal dtypes.

    Differences up to ``slack`` times the largest magnitude in ``b`` do not count.
    """
    if not a.numel():
        return Difference(0, 0.0)
    steps = (steps_of(a) - steps_of(b)).abs()
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


def steps_of(x: torch.Tensor) -> torch.Tensor:
    """Map floating-point values to integers so that neighbours differ by one. int64, same shape; NaNs are all equal."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[x.itemsize]
    raw = x.contiguous().view(integer).to(torch.int64)
    magnitude = raw & torch.iinfo(integer).max
    signed = torch.where(raw < 0, -magnitude, magnitude)
    return torch.where(x.float().isnan(), 1 << 40, signed)
