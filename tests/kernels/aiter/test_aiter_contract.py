"""Every precondition of a kernel, shared or AITER's own: declined, and what AITER would do without the check."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.simulated_aiter import FP8, ROCM, Unchecked, backend, fate, inputs, twin
from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.absorb import AbsorbWeight
from vllm_aiter_mla.kernels.aiter import contract
from vllm_aiter_mla.kernels.aiter.route import kernel_for, route_of
from vllm_aiter_mla.kernels.inputs import DecodeInputs, LayerShape, contract_violation, synthetic_inputs
from vllm_aiter_mla.kernels.platform import Platform

pytestmark = pytest.mark.usefixtures("fake_gfx942")
GFX942 = Platform("gfx942", ROCM)


def every_other(x, dim):
    """The same values with the stride of ``dim`` doubled and rubbish between them."""
    dim %= x.dim()
    wide = torch.full([2 * n if d == dim else n for d, n in enumerate(x.shape)], 77, dtype=x.dtype)
    view = wide[(slice(None),) * dim + (slice(None, None, 2),)]
    view.copy_(x)
    return view


def weight(values):
    return lambda good: replace(good, weight=AbsorbWeight("plain", values(good.weight.values)))


def change(**how):
    return lambda good: replace(good, **{name: f(getattr(good, name)) for name, f in how.items()})


def cached(convert, out):
    """Another cache, and the type of the query that comes with it."""
    return lambda good: replace(good, kv_cache=convert(good.kv_cache), out_dtype=out)


def odd_rows(kv_c):
    wide = torch.zeros(kv_c.shape[0], 513, dtype=kv_c.dtype)
    wide[:, 1:] = kv_c
    return wide[:, 1:]


def single_precision(good):
    wide = {name: torch.Tensor.float for name in ("q", "k_pe", "kv_c", "cos_sin_cache")}
    good = change(**wide, kv_cache=lambda x: torch.zeros(x.shape))(good)
    return replace(weight(torch.Tensor.float)(good), out_dtype=torch.float32)


def empty_cache(*shape):
    return change(kv_cache=lambda x: torch.empty(shape, dtype=x.dtype))


def narrow(good):
    """On the card it would lose half of its rope."""
    good = change(kv_c=lambda x: x[:, :256].contiguous(), kv_cache=lambda x: x[..., :320].contiguous())(good)
    return weight(lambda x: x[..., :256].contiguous())(good)


# (what the reason starts with, how to break it, what the simulated AITER does without the check).
# "wrong": it runs, and cache or query differ from the reference; None: only real hardware could tell.
Row = tuple[str, Callable[[DecodeInputs], DecodeInputs], str | None]
SHARED = [
    ("q: [T, N", change(q=lambda x: x[:, 0]), None),
    ("q: [T, N", change(q=lambda x: x[..., 16:]), None),
    ("q: [T, N", change(k_pe=lambda x: x[..., :63]), None),
    ("k_pe: shape", change(k_pe=lambda x: x.unsqueeze(1)), "SIGABRT"),
    ("k_pe: shape", change(k_pe=lambda x: x[:4]), None),
    ("kv_c: shape", change(kv_c=lambda x: x[:3].clone()), "SIGABRT"),
    ("positions: shape", change(positions=lambda x: x[:3].clone()), "SIGABRT"),
    ("positions: shape", change(positions=lambda x: torch.cat([x, x])), None),
    ("w_uk_t: N, P and L", weight(lambda x: x[:, :8]), "raised"),
    ("w_uk_t: N, P and L", weight(lambda x: x[:1]), None),
    ("w_uk_t: N, P and L", weight(lambda x: x[0]), None),
    # Read as block size 1, slot s lands at block s: beyond the cache for all but the first few.
    ("kv_cache: [blocks", change(kv_cache=lambda x: x.unsqueeze(1)), "SIGABRT: Memory access fault by GPU: a KV row"),
    ("kv_cache: [blocks", change(kv_cache=lambda x: x[..., :544].contiguous()), "SIGABRT"),
    ("slot_mapping: shape", change(slot_mapping=lambda x: torch.cat([x, x.flip(0)])), "SIGABRT"),
    ("slot_mapping: shape", change(slot_mapping=lambda x: x[:4]), "wrong"),
    ("slot_mapping: shape", change(slot_mapping=lambda x: x[None]), None),
    ("cos_sin_cache: [max", change(cos_sin_cache=lambda x: x[:, :62].contiguous()), "SIGABRT"),
    ("cos_sin_cache: dtype", change(cos_sin_cache=torch.Tensor.float), "wrong"),
    ("kv_c: dtype", change(kv_c=torch.Tensor.double), "raised AssertionError"),
    ("k_pe: dtype", change(k_pe=torch.Tensor.half), "wrong"),
    ("w_uk_t: dtype", weight(torch.Tensor.half), None),
    ("slot_mapping: torch.int64", change(slot_mapping=torch.Tensor.int), "SIGABRT: Memory access fault by GPU: slot_m"),
    ("positions: torch.int64", change(positions=torch.Tensor.int), "SIGABRT"),
    ("k_scale: one float32", change(k_scale=torch.Tensor.double), "raised AssertionError"),
    ("q_scale: one float32", change(q_scale=torch.Tensor.half), "SIGABRT"),
    ("q_scale: one float32", change(q_scale=lambda x: x.reshape(1)[:0]), None),
    ("kv_cache: view uint8", cached(lambda x: x.view(torch.uint8), torch.bfloat16),
     "SIGABRT: [AITER] kv cache data type is not supported\n"),
    ("kv_cache: an e4m3 type", cached(lambda x: torch.zeros(x.shape).half(), torch.bfloat16), "wrong"),
    *[("kv_cache: an e4m3 type", change(kv_cache=lambda x, to=to: torch.zeros(x.shape).to(to)), None)
     for to in (torch.int8, torch.bool, torch.float8_e5m2, torch.float8_e8m0fnu)],
    ("out_dtype: one of", change(kv_cache=lambda x: torch.zeros(x.shape, dtype=torch.bfloat16)), "SIGABRT"),
    ("out_dtype: one of", lambda good: replace(good, out_dtype=torch.float16), "wrong"),
]  # fmt: skip
AITERS = [
    ("cache-empty: ", empty_cache(3, 0, 576), "SIGFPE"),
    ("cache-empty: ", empty_cache(0, 16, 576), "SIGABRT"),
    ("widths: kv_lora_rank 256 and rope width 64", narrow, None),
    ("devices: w_uk_t is on meta, the cache on cpu", weight(lambda x: x.to("meta")), None),
    ("table: ", change(cos_sin_cache=lambda x: x[:0]), None),
    ("activation-dtype: ", single_precision, None),
    (
        "cache-dtype: ",
        cached(lambda x: x.view(FP8["gfx950"]), FP8["gfx950"]),
        "raised AssertionError: Unsupported dtype",
    ),
    ("last-stride: q", change(q=lambda x: every_other(x, -1)), "wrong"),
    ("last-stride: kv_c", change(kv_c=lambda x: every_other(x, -1)), "SIGABRT"),
    ("last-stride: k_pe", change(k_pe=lambda x: every_other(x, -1)), "SIGABRT"),
    ("last-stride: kv_cache", change(kv_cache=lambda x: every_other(x.view(torch.uint8), -1).view(x.dtype)), "wrong"),
    ("index-stride: slot", change(slot_mapping=lambda x: every_other(x, 0)), "SIGABRT"),
    ("index-stride: pos", change(positions=lambda x: every_other(x, 0)), "wrong"),
    ("alignment: kv_c", change(kv_c=odd_rows), None),
]
BROKEN = SHARED + AITERS
NAMES = [f"{name}-{i}" for i, (name, _, _) in enumerate(BROKEN)]


def right(good, broken):
    """Whether the unchecked call gave what the unbroken operands should have given, as numbers."""
    expected = twin(good)
    query = reference.prepare(expected)
    out = Unchecked().prepare(broken)
    rows, wanted = (cache.reshape(-1, 576).float() for cache in (broken.kv_cache, expected.kv_cache))
    kept = good.slot_mapping[good.slot_mapping >= 0]
    return torch.equal(out.float(), query.float()) and torch.equal(rows[kept], wanted[kept])


@pytest.mark.parametrize(("name", "breaks", "fates"), BROKEN, ids=NAMES)
def test_a_broken_precondition_is_declined(name, breaks, fates):
    broken = breaks(inputs())
    assert str(contract.violation(broken, GFX942)).startswith(name)
    shared = (name, breaks, fates) in SHARED
    assert str(contract_violation(broken)).startswith(name if shared else "None"), "another kernel may take it"


@pytest.mark.mutation("I6")
@pytest.mark.parametrize(("check", "unseen"), [("_broken", "cache-empty"), ("_broken_layout", "last-stride: kv_c")])
def test_mutation_a_limit_that_nobody_looks_at_is_caught(monkeypatch, check, unseen):
    monkeypatch.setattr(contract, check, lambda *asked: iter(()))
    case = next(case for case in AITERS if case[0].startswith(unseen))
    with pytest.raises(AssertionError, match=unseen):
        test_a_broken_precondition_is_declined(*case)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("name", "breaks", "fates"), [case for case in BROKEN if case[2]], ids=lambda case: str(case)[:24]
)
def test_bypassing_the_check_ends_badly(name, breaks, fates):
    good = inputs()
    outcome = fate(lambda: right(good, breaks(twin(good))))
    assert outcome.startswith("False" if fates == "wrong" else fates), outcome


def test_the_same_call_unbroken_is_right():
    good = inputs()
    assert fate(lambda: right(good, twin(good))) == "True"
    assert contract.violation(good, GFX942) is None


def test_every_limit_has_a_test_and_a_place_in_the_manual():
    elsewhere = {"rocm", "arch", "int-strides", "absorb"}  # absorb: test_absorb.py
    assert {name.partition(":")[0] for name, _, _ in AITERS} | elsewhere == set(contract.LIMITS)
    manual = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert [name for name in (*contract.LIMITS, "kernel") if f"`{name}`" not in manual] == []


@pytest.mark.parametrize(
    ("platform", "reason"),
    [
        (Platform("gfx942", None), "rocm: torch is not built for ROCm"),
        (Platform("gfx950", (6, 4)), "rocm: ROCm 6.4"),
        (Platform("gfx90a", (7, 0)), "arch: this card is gfx90a"),
    ],
)
def test_other_platforms_are_declined(platform, reason):
    assert str(contract.violation(inputs(), platform)).startswith(reason)


# The query then has the dtype of the cache.
UNDO_EACH_OTHER = [{cache, "out_dtype: one of"} for cache in ("kv_cache: view uint8", "kv_cache: an e4m3 type")]


@given(st.lists(st.sampled_from(BROKEN), min_size=1, max_size=2))
def test_operands_broken_in_two_ways_are_declined_and_nothing_raises(cases):
    operands = inputs()
    for _, breaks, _ in cases:
        try:
            operands = breaks(operands)
        except (RuntimeError, IndexError):  # the first break leaves nothing for the second
            return
    reason = contract.violation(operands, GFX942)
    assert reason is not None or {name for name, *_ in cases} in UNDO_EACH_OTHER


@pytest.mark.parametrize(
    ("name", "dim"), [("q", 0), ("q", 1), ("k_pe", 0), ("kv_c", 0), ("kv_cache", 0), ("kv_cache", 1)]
)
def test_a_stride_that_wraps_in_32_bits_is_declined(name, dim):
    ghost = synthetic_inputs(LayerShape(4, 16, FP8["gfx942"], FP8["gfx942"], 16, False, device="meta"))
    given = getattr(ghost, name)
    strides = list(given.stride())
    for stride, skipped in ((contract.STRIDE_LIMIT, True), (contract.STRIDE_LIMIT - 576, False)):
        strides[dim] = stride
        wide = torch.empty_strided(given.shape, strides, dtype=given.dtype, device="meta")
        reason = str(contract.violation(replace(ghost, **{name: wide}), GFX942))
        assert reason.startswith(f"int-strides: {name} has strides" if skipped else "None"), reason


def test_a_cache_too_large_for_one_block_is_not_handed_over_as_one():
    ghost = torch.empty(1 << 18, 16, 576, dtype=FP8["gfx942"], device="meta")
    assert route_of(ghost, 7, 16, 64, GFX942, "opt").view is None
    assert route_of(ghost.view(-1, 1, 576), 7, 16, 64, GFX942, "opt").kernel == "per-head"
    assert route_of(ghost[: 1 << 8].view(-1, 1, 576), 7, 16, 64, GFX942, "opt").view == (1, -1, 576)


def test_too_few_heads_are_served_below_256_tokens_only_by_the_per_head_kernel():
    few, many = (inputs(heads=2, tokens=tokens) for tokens in (255, 256))
    assert backend().kernel_of(few) == "per-head"
    assert "kernel=aiter runs the other" in str(backend(opt=True).refuse(few))
    assert str(backend().refuse(many)).startswith("kernel: 2 heads and 256 tokens land on AITER's general kernel")


def test_the_general_kernel_aborts_on_the_flag_for_all_rows():
    assert kernel_for(16, 512, 64, 2, 7) == "general"
    bound = Unchecked()
    honest = bound._op
    bound._op = lambda *operands: honest(*operands[:-1], True)
    outcome = fate(lambda: bound.prepare(inputs(heads=2)))
    assert outcome.startswith("SIGABRT: [AITER] compute_all_q_rope is not supported by the general kernel")


def test_a_zero_token_launch_which_prepare_never_makes_would_poison_the_next_call():
    outcome = fate(lambda: [Unchecked().prepare(operands) for operands in (inputs(tokens=0), inputs())])
    assert outcome.startswith("raised RuntimeError: HIP error: invalid configuration argument")
