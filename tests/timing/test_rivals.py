"""The rivals that measure times: how they are called, what they decline, and that they never serve."""

from dataclasses import replace
from sys import maxsize
from unittest.mock import Mock

import pytest
import torch

from tests.sandbox.simulated_aiter import ROCM
from tests.support.planted import raising
from vllm_aiter_mla.commands.check.timing import rivals
from vllm_aiter_mla.commands.check.timing.record import RIVALS, VLLM
from vllm_aiter_mla.commands.check.timing.rivals import DecodeTileBackend, OneLaunchBackend, decode_tile
from vllm_aiter_mla.commands.check.timing.stand_in import StandInBackend
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.kernels import absorb, reference
from vllm_aiter_mla.kernels.absorb import AbsorbWeight
from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.inputs import DecodeInputs, LayerShape, synthetic_inputs
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.serving.backends import candidates
from vllm_aiter_mla.settings import KERNELS, Settings
from vllm_aiter_mla.startup.comparison import compare_with_reference

FNUZ, BF16 = torch.float8_e4m3fnuz, torch.bfloat16
MI300X, MI355X = Platform("gfx942", ROCM), Platform("gfx950", ROCM)
SHAPE = LayerShape(4, 128, BF16, BF16, 16, False, weight=("fp8", FNUZ))


def by_reference(
    q_nope, codes, scale, q_pe, kv_c, k_pe, cache, slots, positions, cos, sin, *, k_scale, is_neox, q_out_dtype,
    group_size=0,
):  # fmt: skip
    """What AITER's functions do with these arguments: heads first in q_nope, one KV head, no scale of the query."""
    assert (cos.dtype, sin.dtype) == (torch.float32, torch.float32), "each product would be rounded to 16 bits"
    assert group_size == (128 if scale.dtype == torch.float32 else 0)
    one = torch.ones(1)
    made = DecodeInputs(
        q=torch.cat([q_nope.transpose(0, 1), q_pe], dim=-1), k_pe=k_pe.squeeze(1), kv_c=kv_c.squeeze(1),
        weight=AbsorbWeight("fp8" if group_size else "mxfp4", codes, scale), kv_cache=cache, slot_mapping=slots,
        positions=positions, cos_sin_cache=torch.cat([cos, sin], dim=-1).to(q_pe.dtype),
        k_scale=one if k_scale is None else k_scale, q_scale=one, is_neox=is_neox, out_dtype=q_out_dtype,
    )  # fmt: skip
    return reference.prepare(made), None, None, None


OPS = {"fp8": by_reference, "mxfp4": by_reference}


@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize(
    ("platform", "change"),
    [(MI300X, {}), (MI300X, {"cache_dtype": FNUZ}), (MI355X, {"weight": ("mxfp4",)})],
    ids=["fp8 weight", "fp8 weight and cache", "mxfp4 weight"],
)
def test_its_arguments_lead_to_the_results_of_the_reference(platform, change, is_neox):
    found = compare_with_reference(OneLaunchBackend(platform, OPS), replace(SHAPE, is_neox=is_neox, **change), maxsize)
    assert found.has_passed, found.message


@pytest.mark.mutation
@pytest.mark.parametrize(("wrong", "parts"), [("is_neox", ("q rope", "kv rope")), ("k_scale", ("kv nope", "kv rope"))])
def test_mutation_an_argument_that_is_handed_over_wrongly_fails_the_check(wrong, parts):
    def spoilt(*given, **named):
        return by_reference(*given, **named | {wrong: not named[wrong] if wrong == "is_neox" else torch.ones(1)})

    shape = replace(SHAPE, cache_dtype=FNUZ)
    assert compare_with_reference(OneLaunchBackend(MI300X, {"fp8": spoilt}), shape, maxsize).failed_parts == parts


def test_it_declines_what_it_would_do_wrongly():
    bound, right = OneLaunchBackend(MI300X, OPS), synthetic_inputs(SHAPE)
    assert bound.refuse(right) is None
    fp8 = synthetic_inputs(replace(SHAPE, cache_dtype=FNUZ, out_dtype=FNUZ))
    gaps = torch.zeros(3, 32, 576, dtype=BF16)[:, :16]
    for inputs, word in (
        (fp8, "does not scale"),
        (synthetic_inputs(replace(SHAPE, weight=("plain",))), "not plain ones"),
        (replace(right, slot_mapping=right.slot_mapping[:5]), "slot_mapping: shape [7]"),
        (synthetic_inputs(SHAPE, 0), "q: at least one row"),
        (replace(right, kv_cache=gaps), "contiguous blocks"),
        (synthetic_inputs(replace(SHAPE, weight=("mxfp4",))), "on gfx950 only"),
    ):
        assert word in str(bound.refuse(inputs)), word
    assert OneLaunchBackend(MI300X, OPS, has_unit_scale=True).refuse(fp8) is None


@pytest.mark.parametrize(
    ("tokens", "heads", "tile", "programs"),
    [(1, 16, (16, 32), 256), (16, 16, (16, 32), 256), (64, 128, (64, 128), 512)],
)
def test_a_tile_for_few_rows_fills_three_quarters_of_a_card(tokens, heads, tile, programs):
    found = decode_tile(tokens, heads, 512, units=304)
    assert (found["BLOCK_SIZE_M"], found["BLOCK_SIZE_N"]) == tile
    assert heads * -(-tokens // tile[0]) * 512 // tile[1] == programs


@pytest.mark.usefixtures("fake_gfx942")
def test_the_tile_reaches_vllms_product_and_changes_no_byte(monkeypatch):
    gemm, tiles = compat_layer.absorb_products()["fp8"], []

    def called(*operands, config=None, **options):
        tiles.append(config)
        return gemm(*operands, **options)

    monkeypatch.setitem(absorb.GEMMS, "fp8", called)
    inputs = synthetic_inputs(SHAPE)
    untiled, tiled = AiterBackend(MI300X).prepare(inputs), DecodeTileBackend(MI300X, 304).prepare(inputs)
    assert torch.equal(untiled, tiled)
    assert tiles == [None, decode_tile(inputs.num_tokens, 4, 512, 304)]
    bound = DecodeTileBackend(MI300X, 304)
    assert "takes a tile" in str(bound.refuse(synthetic_inputs(replace(SHAPE, weight=("plain",)))))
    assert "up to 256 rows" in str(bound.refuse(synthetic_inputs(SHAPE, 257)))


def test_a_rival_that_memory_does_not_suffice_for_costs_the_others_nothing(monkeypatch):
    monkeypatch.setattr(rivals, "_one_launch_backend", raising(torch.OutOfMemoryError("planted")))
    monkeypatch.setattr(rivals, "_decode_tile_backend", lambda *_: DecodeTileBackend(MI300X, 304, op=Mock()))
    runnable, untimed_reasons = rivals.check_rivals(MI300X, SHAPE, 8, True, {}, lambda name: None)
    assert (set(runnable), untimed_reasons) == ({"aiter-decode-tile"}, {"aiter-one-launch": "planted"})


def test_rivals_are_named_by_no_option_and_never_serve():
    served = {name for kernel in KERNELS for name in candidates(Settings(kernel=kernel), MI300X)}
    names = {OneLaunchBackend.name, DecodeTileBackend(MI300X, 304, op=Mock()).name, StandInBackend.name}
    assert not names & (served | set(KERNELS))
    assert names | {VLLM} == set(RIVALS)
