"""I14: what an fp8 overflow of the rotated half becomes: NaN in AITER's op, the largest value in vLLM's and in ours."""

from sys import maxsize

import pytest
import torch

from tests.sandbox.simulated_aiter import execute
from tests.support.simulated_aiter import FP8, backend, inputs, same_bytes, twin
from vllm_aiter_mla.kernels import formats, reference
from vllm_aiter_mla.kernels.inputs import LayerShape
from vllm_aiter_mla.startup.comparison import compare_with_reference

INF, NAN = float("inf"), float("nan")


def turned_by_nothing(arch, values):
    """One row with scales of 1 and an angle of 0: what is stored is ``values``, in the query and in the KV row."""
    operands = inputs(arch, tokens=1, is_neox=True)
    operands.slot_mapping[0] = 5
    operands.cos_sin_cache[:, :32], operands.cos_sin_cache[:, 32:] = 1.0, 0.0
    operands.k_scale.fill_(1.0), operands.q_scale.fill_(1.0)
    operands.q[..., -64:], operands.k_pe[:] = 0.0, 0.0
    operands.q[..., -64 : len(values) - 64] = operands.k_pe[:, : len(values)] = torch.tensor(values).bfloat16()
    return operands


# bfloat16 holds 247 and 248 in steps of 1, and 448 to 512 in steps of 2.
VALUES = [200.0, 231.0, 233.0, 240.0, 247.0, -247.0, 248.0, -248.0, 448.0, 464.0, 466.0, -466.0, 1e4, -1e30]
AITER_GIVES = {
    "gfx942": [192, 224, 240, 240, 240, -240, *[NAN] * 8],
    "gfx950": [192, 224, 240, 240, 240, -240, 256, -256, 448, 448, NAN, NAN, NAN, NAN],
}
OTHERS_GIVE = {
    "gfx942": [192, 224, 240, 240, 240, -240, 240, -240, 240, 240, 240, -240, 240, -240],
    "gfx950": [192, 224, 240, 240, 240, -240, 256, -256, 448, 448, 448, -448, 448, -448],
}


@pytest.mark.parametrize("name", ["AITER", "TRITON", "VLLM_KERNEL", "VLLM_COMPILED"])
def test_overflow_in_the_reference_is_by_model_and_card(arch, name):
    numerics, given = getattr(reference, name), AITER_GIVES if name == "AITER" else OTHERS_GIVE
    operands, wanted = turned_by_nothing(arch, VALUES), torch.tensor(given[arch]).float()
    query = reference.prepare(operands, numerics)[0, 0, 512:].float()[: len(VALUES)]
    row = operands.kv_cache.flatten(0, 1)[5, 512:].float()[: len(VALUES)]
    assert row.allclose(wanted, rtol=0, equal_nan=True)
    # vLLM clamps a query to 224 on gfx942.
    top = 224.0 if numerics.rounding != "aiter" and arch == "gfx942" else 448.0
    assert query.allclose(wanted.clamp(-top, top), rtol=0, equal_nan=True)


def test_overflow_in_the_simulated_aiter_is_the_references_and_the_latent_saturates(arch):
    operands = turned_by_nothing(arch, [*VALUES, INF, NAN])
    operands.kv_c[0, :3] = torch.tensor([1e4, -1e4, NAN])
    expected = twin(operands)
    assert same_bytes(backend(arch).prepare(operands), reference.prepare(expected))
    assert same_bytes(operands.kv_cache, expected.kv_cache)
    top = formats.FLAVOURS[FP8[arch]].max
    assert operands.kv_cache.flatten(0, 1)[5, :3].tolist() == [top, -top, -top]


@pytest.mark.parametrize("name", ["AITER", "TRITON", "VLLM_KERNEL", "VLLM_COMPILED"])
def test_a_nan_stays_one_in_what_is_rotated_and_in_the_rest_as_vllm_keeps_it(arch, name):
    numerics = getattr(reference, name)
    operands = turned_by_nothing(arch, [1.0, NAN, -2.0])
    operands.kv_c[0, :3] = torch.tensor([1.0, NAN, -2.0])
    query = reference.prepare(operands, numerics)[0, 0, 512:].float()
    row, top = operands.kv_cache.flatten(0, 1)[5].float(), formats.FLAVOURS[FP8[arch]].max
    hidden = -top if numerics.rounding == "aiter" else NAN
    wanted = torch.tensor([1.0, NAN, -2.0])
    assert query[:3].allclose(wanted, equal_nan=True)
    assert row[512:515].allclose(wanted, equal_nan=True)
    assert row[:3].allclose(torch.tensor([1.0, hidden, -2.0]), equal_nan=True)


def clamping(inner):
    """AITER's conversion, as a build that clamps would have it."""
    return lambda x, dtype: inner(x.clamp(-execute.FP8_MAX[dtype], execute.FP8_MAX[dtype]), dtype)


@pytest.mark.parametrize("opt", [False, True])
@pytest.mark.parametrize("query", ["fp8", "bf16"])
@pytest.mark.mutation("I14")
def test_mutation_overflow_of_a_clamping_aiter_is_told(arch, opt, query, monkeypatch):
    shape = LayerShape(4, 16, FP8[arch], FP8[arch] if query == "fp8" else torch.bfloat16, 16, False)
    today = compare_with_reference(backend(arch, opt=opt), shape, maxsize)
    assert (today.has_passed, today.writes_nan) == (True, True), today.message
    monkeypatch.setattr(execute, "encode", clamping(execute.encode))
    clamped = compare_with_reference(backend(arch, opt=opt), shape, maxsize)
    assert (clamped.has_passed, clamped.writes_nan) == (True, False), clamped.message


@pytest.mark.mutation("I14")
def test_mutation_overflow_in_one_of_aiters_two_kernels_is_noticed(arch, monkeypatch):
    rope = execute._rope

    def only_opt_overflows(*args, **kwargs):
        ran.add(args[5].kernel)
        clamps = args[5].kernel == "per-head"
        monkeypatch.setattr(execute, "encode", clamping(encode) if clamps else encode)
        return rope(*args, **kwargs)

    encode, ran = execute.encode, set()
    monkeypatch.setattr(execute, "_rope", only_opt_overflows)
    found = compare_with_reference(backend(arch), LayerShape(4, 16, FP8[arch], FP8[arch], 16, False), maxsize)
    assert (found.has_passed, found.writes_nan, ran) == (True, True, {"per-head", "opt"})


def test_overflow_of_an_unquantised_cache_is_none(arch):
    found = compare_with_reference(backend(arch), LayerShape(4, 16, torch.bfloat16, torch.bfloat16, 16, False), maxsize)
    assert (found.has_passed, found.writes_nan) == (True, False), found.message
