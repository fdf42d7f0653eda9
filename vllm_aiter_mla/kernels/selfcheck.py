"""Run a back end on synthetic rows and compare it with the reference, before the first graph is captured.

Nothing about AITER was measured by this project, and two facts about its rounding are inferred from its source. The
self-check turns them into something every start-up verifies on the user's own card.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from vllm_aiter_mla.kernels import fp8, reference
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.inputs import DecodeInputs

TOKENS = 7
MANY_TOKENS = 256  # AITER's per-head kernel hands over to another here
PADDED = 3  # the row without a slot, in the middle
Q_LORA_RANK = 1536  # DeepSeek-V3's; it only moves k_pe away from the start of a row
PATTERN = 0x35  # the scratch cache is filled with this byte; a finite number in every type


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a self-check has to know of a layer; everything else is synthetic.

    Attributes:
        heads: query heads of this rank.
        nope_dim: width of a query head's un-rotated part.
        cache_dtype: activation dtype, or the card's fp8 type.
        out_dtype: dtype of the prepared query.
        block_size: of the KV cache.
        is_neox: the rotary style.
        act: activation dtype.
        device: where to run.
        latent: ``kv_lora_rank``.
        rope: rope width.
        weight_dtype: of the absorbed weight where it is held in fp8, for AITER's batched GEMM; None for ``act``.
    """

    heads: int
    nope_dim: int
    cache_dtype: torch.dtype
    out_dtype: torch.dtype
    block_size: int
    is_neox: bool
    act: torch.dtype = torch.bfloat16
    device: str | torch.device = "cpu"
    latent: int = 512
    rope: int = 64
    weight_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """What still counts as agreement, in representable steps of the stored type (PR vllm-project/vllm#55230's bar).

    Attributes:
        nope_steps: largest distance in the un-rotated part.
        rope_steps: largest distance in the rotated part.
        rope_share: largest share of rotated elements that differ at all.
        slack: differences of the query's un-rotated part up to this share of its largest magnitude do not count.
    """

    nope_steps: int = 0
    rope_steps: int = 1
    rope_share: float = 0.01
    slack: float = 0.0


EXACT = Bounds()
# Of AITER's fp8 GEMM, as ||own - reference|| / ||reference||. A value on a rounding tie may fall to either side by the
# last bit of a reciprocal, and one such code moves a whole row of products: representable steps would say "wrong".
PRODUCT_BOUND = 0.01
# A kernel with a BMM of its own sums in another order: a step here and there, many of them next to zero.
OWN_BMM = Bounds(nope_steps=1, slack=2**-8)


@dataclass(frozen=True, slots=True)
class Difference:
    """Distance of one tensor part from the reference: largest step and share of elements that differ."""

    steps: int
    share: float


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


def synthetic_inputs(shape: LayerShape, tokens: int = TOKENS, seed: int = 20260) -> DecodeInputs:
    """Random operands for ``shape`` with one padded row and a scratch cache of three blocks or ``tokens`` slots.

    Values stay where no rotated element overflows fp8: what happens there is inferred, and not worth a refusal.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * scale).to(shape.act).to(shape.device)

    width = shape.latent + shape.rope
    blocks = max(3, -(-tokens // shape.block_size) + 1)
    slots = torch.randperm(blocks * shape.block_size, generator=generator)[:tokens]
    slots[min(PADDED, tokens - 1)] = -1
    angles = torch.rand(4 * tokens, shape.rope // 2, generator=generator) * 6.283
    table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(shape.act).to(shape.device)
    # One block of another layer before it: vLLM packs the caches of all layers into one allocation.
    raw = torch.full((blocks + 1, shape.block_size, width * shape.cache_dtype.itemsize), PATTERN, dtype=torch.uint8)
    weight = normal(shape.heads, shape.nope_dim, shape.latent, scale=shape.nope_dim**-0.5)
    weight_scale = None
    if shape.weight_dtype is not None:
        weight, weight_scale = _in_fp8(weight, fp8.flavour_of(shape.weight_dtype))
    return DecodeInputs(
        q=normal(tokens, shape.heads, shape.nope_dim + shape.rope),
        # As serving hands them over: the last columns of one projection's result, a row far from the next.
        k_pe=normal(tokens, Q_LORA_RANK + width)[:, Q_LORA_RANK + shape.latent :],
        kv_c=normal(tokens, shape.latent),
        w_uk_t=weight,
        kv_cache=raw.to(shape.device)[1:].view(shape.cache_dtype),
        slot_mapping=slots.to(shape.device),
        positions=torch.randint(0, 4 * tokens, (tokens,), generator=generator).to(shape.device),
        cos_sin_cache=table,
        k_scale=torch.tensor(0.053, dtype=torch.float32, device=shape.device),
        q_scale=torch.tensor(0.047, dtype=torch.float32, device=shape.device),
        is_neox=shape.is_neox,
        out_dtype=shape.out_dtype,
        w_uk_scale=weight_scale,
    )


def _in_fp8(weight: torch.Tensor, flavour: fp8.Fp8Flavour) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp8 weight [N, P, L] with unit stride along P, its scale), laid out as vLLM's ``W_K.transpose(1, 2)``."""
    scale = weight.float().abs().max() / flavour.max
    codes = fp8.round_saturating(weight.transpose(1, 2).contiguous().float() / scale, flavour)
    return codes.transpose(1, 2), scale


def warm_up(backend: KernelBackend, shape: LayerShape) -> None:
    """Load or compile the back end's module with one row whose slot is -1: it writes nothing to the cache."""
    one = synthetic_inputs(shape, tokens=1)
    one.slot_mapping.fill_(-1)
    if backend.refuse(one) is None:
        backend.prepare(one)


def self_check(backend: KernelBackend, shape: LayerShape, bounds: Bounds | None = None) -> SelfCheckResult:
    """Warm ``backend`` up and compare it with the reference on synthetic rows; a disagreement is no error.

    Call it on every rank, outside graph capture; it synchronises with the device. If a longer batch runs on another
    kernel of the back end, that one is checked too. ``bounds`` defaults to :data:`OWN_BMM` for Triton, which holds
    the BMM; to :data:`EXACT` elsewhere. Over fp8 weights the product is the back end's own GEMM: it is compared by
    :data:`PRODUCT_BOUND`, and the rest with the reference over that same product.

    Raises:
        KernelCaptureError: called inside a capture.
    """
    if bounds is None:
        bounds = OWN_BMM if backend.name == "triton" else EXACT
    warm_up(backend, shape)
    result = _check_once(backend, synthetic_inputs(shape), bounds)
    kernel_of = getattr(backend, "kernel_of", None)
    if result.ok and kernel_of is not None:
        few, many = (synthetic_inputs(shape, tokens) for tokens in (TOKENS, MANY_TOKENS))
        if backend.refuse(many) is None and kernel_of(few) != kernel_of(many):
            return _check_once(backend, many, bounds)
    return result


def _check_once(backend: KernelBackend, inputs: DecodeInputs, bounds: Bounds) -> SelfCheckResult:
    reason = backend.refuse(inputs)
    if reason is not None:
        return SelfCheckResult(False, f"{backend.name}: refused the self-check: {reason}", {}, 0)
    product, deviation = _own_product(backend, inputs)
    if deviation > PRODUCT_BOUND:
        message = f"{backend.name}: self-check FAILED: its absorb product is {deviation:.2%} off"
        return SelfCheckResult(False, message, {}, 0)
    untouched = _bytes(inputs.kv_cache).clone()
    q_out = backend.prepare(inputs)
    results = []
    for numerics in _accepted(backend, inputs):
        twin = replace(inputs, kv_cache=untouched.clone().view(inputs.kv_cache.dtype))
        results.append(_compare(backend, inputs, q_out, twin, reference.prepare(twin, numerics, product), bounds))
        if results[-1].ok:
            return results[-1]
    return results[0]


def _own_product(backend: KernelBackend, inputs: DecodeInputs) -> tuple[torch.Tensor | None, float]:
    """(absorbed query of the back end's GEMM over fp8 weights, its relative distance from the reference's)."""
    own = getattr(backend, "absorbed", None)
    if inputs.w_uk_scale is None or own is None:
        return None, 0.0
    q_nope = inputs.q[..., : inputs.nope_dim]
    product, expected = own(inputs, q_nope), reference.absorbed(inputs, q_nope)
    if product.shape != expected.shape or product.dtype != expected.dtype:
        return product, float("inf")
    distance = (product.float() - expected.float()).norm() / expected.float().norm()
    return product, float("inf") if distance.isnan() else float(distance)


def _accepted(backend: KernelBackend, inputs: DecodeInputs) -> list[reference.Numerics]:
    # AITER's opt kernel is read to truncate a bf16 cache's rope part on gfx942. Should it round, so much the better.
    rule = getattr(backend, "numerics", None)
    expected = rule(inputs) if rule is not None else reference.AITER
    return [expected] if expected == reference.AITER else [expected, reference.AITER]


def _compare(
    backend: KernelBackend,
    inputs: DecodeInputs,
    q_out: torch.Tensor,
    twin: DecodeInputs,
    expected: torch.Tensor,
    bounds: Bounds,
) -> SelfCheckResult:
    if q_out.shape != expected.shape or q_out.dtype != expected.dtype:
        given, wanted = (f"{list(t.shape)} {t.dtype}" for t in (q_out, expected))
        return SelfCheckResult(False, f"{backend.name}: returned {given}, expected {wanted}", {}, 0)
    rows = getattr(backend, "defined_rows", lambda _: inputs.num_tokens)(inputs)
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
    ok = stray == 0 and all(_within(name, found, bounds) for name, found in differences.items())
    figures = ", ".join(f"{name} {d.steps} step(s) on {d.share:.2%}" for name, d in differences.items())
    message = f"{backend.name}: self-check {'passed' if ok else 'FAILED'}: {figures}, {stray} stray bytes"
    return SelfCheckResult(ok, message, differences, stray)


def _within(part: str, found: Difference, bounds: Bounds) -> bool:
    if part.endswith("nope"):
        return found.steps <= bounds.nope_steps
    return found.steps <= bounds.rope_steps and found.share <= bounds.rope_share


def difference(a: torch.Tensor, b: torch.Tensor, slack: float = 0.0) -> Difference:
    """Largest distance in representable values, and share of elements that differ, of two tensors of one dtype.

    Differences up to ``slack`` times the largest magnitude in ``b`` do not count.
    """
    if not a.numel():
        return Difference(0, 0.0)
    steps = (steps_of(a) - steps_of(b)).abs()
    if slack:
        near = (a.float() - b.float()).abs() <= slack * b.float().abs().max()
        steps = torch.where(near, 0, steps)
    return Difference(int(steps.max()), float((steps > 0).double().mean()))


def steps_of(x: torch.Tensor) -> torch.Tensor:
    """Map floating-point values to integers so that neighbours differ by one. int64, same shape; NaNs are all equal."""
    if fp8.is_fp8(x.dtype):
        return fp8.ordinal(x).to(torch.int64)
    integer = {2: torch.int16, 4: torch.int32}[x.dtype.itemsize]
    raw = x.contiguous().view(integer).to(torch.int64)
    magnitude = raw & ((1 << (8 * x.dtype.itemsize - 1)) - 1)
    signed = torch.where(raw < 0, -magnitude, magnitude)
    return torch.where(x.isnan(), 1 << 40, signed)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def _rows(cache: torch.Tensor) -> torch.Tensor:
    """[blocks, block_size, width] -> [slots, width]; bytes move as they are (fp8 has no indexing everywhere)."""
    return cache.reshape(-1, cache.shape[2])
