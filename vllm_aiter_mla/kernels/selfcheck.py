"""Run a back end on synthetic rows and compare it with the reference, before the first graph is captured.

Nothing about AITER was measured by this project, and two facts about its rounding are inferred from its source. The
self-check turns them into something every start-up verifies on the user's own card.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.compare import Bounds, Difference, deviation, difference
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.kernels.shape import LayerShape, synthetic_inputs


@dataclass(frozen=True, slots=True)
class SelfCheckResult:
    """Outcome of a self-check.

    Attributes:
        ok: agreement within the bounds.
        message: one line with the figures, fit for a log.
        differences: by part ("q nope", "q rope", "kv nope", "kv rope").
        stray_bytes: bytes of the cache changed outside the written rows.
    """

    ok: bool
    message: str
    differences: dict[str, Difference]
    stray_bytes: int


def warm_up(backend: KernelBackend, shape: LayerShape) -> None:
    """Load or compile the back end's module with one row whose slot is -1: it writes nothing to the cache."""
    one = synthetic_inputs(shape, tokens=1)
    one.slot_mapping.fill_(-1)
    if backend.refuse(one) is None:
        backend.prepare(one)


def self_check(backend: KernelBackend, shape: LayerShape, limit: int | None = None) -> SelfCheckResult:
    """Warm ``backend`` up and compare it with the reference on synthetic rows; a disagreement is no error.

    Call it on every rank, outside graph capture; it synchronises with the device. Each kernel of the back end that a
    batch of up to ``limit`` rows reaches is checked, one batch each. Where a form of the weight has a bound for its
    product, the product is compared by that, and the rest with the reference over that same product.

    Args:
        backend: what is checked.
        shape: the layer.
        limit: L, the last token count of the decode limit; None: any.

    Returns:
        The first result that failed, or else that of the fewest rows.

    Raises:
        KernelCaptureError: called inside a capture.
    """
    warm_up(backend, shape)
    few = synthetic_inputs(shape)
    result, seen = _check_once(backend, few), {backend.kernel_of(few)}
    counts = {min(count, limit or count) for count in backend.tried_counts(few)} if result.ok else ()
    for tokens in sorted(counts):
        more = synthetic_inputs(shape, tokens)
        kernel = backend.kernel_of(more)
        if kernel in seen or backend.refuse(more) is not None:
            continue
        seen.add(kernel)
        found = _check_once(backend, more)
        if not found.ok:
            return found
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
    untouched = _bytes(inputs.kv_cache).clone()
    q_out = backend.prepare(inputs)
    results = []
    # By its source, AITER's opt kernel truncates a bf16 cache's rope part on gfx942. Rounding is accepted as well.
    for numerics in dict.fromkeys((backend.numerics(inputs), reference.AITER)):
        twin = replace(inputs, kv_cache=untouched.clone().view(inputs.kv_cache.dtype))
        expected = reference.prepare(twin, numerics, product)
        # A product inside the launch cannot be compared by itself: its bound is for the query then.
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
    if q_out.shape != expected.shape or q_out.dtype != expected.dtype:
        given, wanted = (f"{list(t.shape)} {t.dtype}" for t in (q_out, expected))
        return SelfCheckResult(False, f"{backend.name}: returned {given}, expected {wanted}", {}, 0)
    rows, bounds = backend.defined_rows(inputs), backend.bounds
    written = inputs.slot_mapping[inputs.slot_mapping >= 0]
    cache, expected_cache = (_rows(operands.kv_cache) for operands in (inputs, twin))
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
    stray = int((_bytes(cache)[outside] != _bytes(expected_cache)[outside]).sum())
    wrong = {name for name, found in differences.items() if not _within(name, found, bounds)}
    if wrong == {"q nope"} and deviation(*parts["q nope"]) <= product_bound:
        wrong = set()
    ok = stray == 0 and not wrong
    figures = ", ".join(f"{name} {d.steps} step(s) on {d.share:.2%}" for name, d in differences.items())
    message = f"{backend.name}: self-check {'passed' if ok else 'FAILED'}: {figures}, {stray} stray bytes"
    return SelfCheckResult(ok, message, differences, stray)


def _within(part: str, found: Difference, bounds: Bounds) -> bool:
    if part.endswith("nope"):
        return found.steps <= bounds.nope_steps
    return found.steps <= bounds.rope_steps and found.share <= bounds.rope_share


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def _rows(cache: torch.Tensor) -> torch.Tensor:
    """[blocks, block_size, width] -> [slots, width]; bytes move as they are (fp8 has no indexing everywhere)."""
    return cache.reshape(-1, cache.shape[2])
