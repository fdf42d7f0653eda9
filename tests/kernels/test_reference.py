"""Properties of the reference kernel, each against a computation by hand that shares no code with it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.simulated_aiter import same_bytes
from vllm_aiter_mla.kernels import formats, reference
from vllm_aiter_mla.kernels.absorb import AbsorbWeight
from vllm_aiter_mla.kernels.distance import ordinals
from vllm_aiter_mla.kernels.inputs import PATTERN, LayerShape, synthetic_inputs

BF16 = torch.bfloat16
FP8 = {"cache_dtype": torch.float8_e4m3fn, "out_dtype": torch.float8_e4m3fn}


def operands(tokens=5, seed=0, **changes):
    """A small random call; row 1 is padded where there is one."""
    shape = replace(LayerShape(2, 8, BF16, BF16, 4, False, latent=16, rope=8), **changes)
    return synthetic_inputs(shape, tokens, padded=1, generator=torch.Generator().manual_seed(seed))


def fresh(call, **changes):
    """The same call over an own copy of the cache."""
    return replace(call, **{"kv_cache": call.kv_cache.clone(), **changes})


def rows(call):
    return call.kv_cache.reshape(-1, call.kv_cache.shape[-1])


@pytest.mark.parametrize("dtype", formats.FLAVOURS)
def test_neighbours_are_one_step_apart(dtype):
    values = torch.arange(256, dtype=torch.uint8).view(dtype)
    finite = values[values.float().isfinite()]
    ordered = finite[finite.float().argsort(stable=True)]
    steps = ordinals(ordered)
    assert set(steps.diff().tolist()) <= {0, 1}  # 0 between the two zeros of e4m3fn
    assert steps[0] == -steps[-1]
    assert (ordinals(values)[~values.float().isfinite()] > 1 << 16).all()


@pytest.mark.parametrize("is_neox", [False, True])
def test_the_prepared_row_is_absorbed_nope_then_rope(is_neox):
    call = operands(is_neox=is_neox, act=torch.float32, cache_dtype=torch.float32, out_dtype=torch.float32)
    out = reference.prepare(call)
    for t in range(5):
        cos, sin = call.cos_sin_cache[call.positions[t]].chunk(2)
        for n in range(2):
            latent = call.q[t, n, :8] @ call.weight.values[n]
            torch.testing.assert_close(out[t, n, :16], latent)
            assert torch.equal(out[t, n, 16:], reference.rotate(call.q[t, n, 8:], cos, sin, is_neox))


@settings(max_examples=60)
@given(
    tokens=st.integers(0, 9),
    block=st.integers(1, 7),
    seed=st.integers(0, 1000),
    cache=st.sampled_from([BF16, torch.float8_e4m3fn, torch.float8_e4m3fnuz]),
    padded=st.sets(st.integers(0, 8)),
)
def test_only_rows_with_a_slot_are_written(tokens, block, seed, cache, padded):
    """Whatever the block size and the padding, all of them included: every other byte stays."""
    call = operands(tokens, block_size=block, seed=seed, cache_dtype=cache)
    for row in padded:
        call.slot_mapping[row : row + 1] = -1
    reference.prepare(call)
    kept = call.slot_mapping[call.slot_mapping >= 0]
    untouched = torch.ones(rows(call).shape[0], dtype=torch.bool)
    untouched[kept] = False
    assert (rows(call).view(torch.uint8)[untouched] == PATTERN).all()
    if len(kept):
        assert (rows(call).view(torch.uint8)[kept] != PATTERN).any()


def test_rows_without_a_slot_are_prepared_but_not_written():
    call = operands(tokens=6)
    unslotted = fresh(call, slot_mapping=call.slot_mapping.clone())
    unslotted.slot_mapping[3:] = -1
    assert same_bytes(reference.prepare(unslotted), reference.prepare(call))
    assert (rows(unslotted).view(torch.uint8)[call.slot_mapping[3:]] == PATTERN).all()


@pytest.mark.parametrize("slots", [0, 3, 6])
def test_another_number_of_slots_than_rows_is_refused(slots):
    call = operands(tokens=5)
    with pytest.raises(ValueError, match=r"slot_mapping: shape \[5\] expected, got"):
        reference.ReferenceBackend().prepare(replace(call, slot_mapping=torch.arange(slots)))


def test_strided_operands_give_the_same_bytes():
    call = operands(**FP8)
    wide_q, wide_k, wide_c = (torch.full(size, 9.0, dtype=BF16) for size in ((5, 4, 30), (5, 20), (5, 40)))
    wide_q[:, 1:3, 7:23], wide_k[:, 3:11], wide_c[:, 5:21] = call.q, call.k_pe, call.kv_c
    gaps = torch.full((call.kv_cache.shape[0], 9, 24), PATTERN, dtype=torch.uint8).view(torch.float8_e4m3fn)
    strided = replace(
        call, q=wide_q[:, 1:3, 7:23], k_pe=wide_k[:, 3:11], kv_c=wide_c[:, 5:21], kv_cache=gaps[:, :4],
        weight=AbsorbWeight("plain", call.weight.values.transpose(1, 2).contiguous().transpose(1, 2)),
    )  # fmt: skip
    assert same_bytes(reference.prepare(strided), reference.prepare(call))
    assert same_bytes(strided.kv_cache, call.kv_cache)
    assert (gaps[:, 4:].view(torch.uint8) == PATTERN).all()


def test_two_rounding_mode_rounds_the_rotated_values_first():
    call = operands(tokens=64, **FP8)
    out = reference.prepare(call, reference.VLLM_COMPILED)
    cos, sin = call.cos_sin_cache[call.positions].float().chunk(2, -1)
    turned = reference.rotate(call.q[..., 8:], cos[:, None], sin[:, None], False).bfloat16()
    wanted = formats.round_saturating(turned.float() * (1 / call.q_scale), formats.E4M3FN)
    assert same_bytes(out[..., 16:], wanted)
    single = reference.prepare(fresh(call))
    steps = (ordinals(out[..., 16:]) - ordinals(single[..., 16:])).abs()
    assert 0 < int((steps > 0).sum()) < 0.1 * steps.numel()
    assert int(steps.max()) == 1
    assert same_bytes(out[..., :16], single[..., :16])
    plain = operands(tokens=64)  # nothing changes without fp8
    assert same_bytes(reference.prepare(plain, reference.VLLM_COMPILED), reference.prepare(fresh(plain)))


def test_no_token_and_no_cache_are_served():
    nothing = operands(tokens=0)
    assert reference.prepare(nothing).shape == (0, 2, 24)
    assert (nothing.kv_cache.view(torch.uint8) == PATTERN).all()
    call = operands()
    bare = replace(call, kv_cache=torch.empty(0, 4, 24, dtype=BF16))
    assert same_bytes(reference.prepare(bare), reference.prepare(call))
