"""Planted mistakes in how AITER is called, each caught by the contract or by the self-check at start-up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.simulated_aiter import FP8, ROCM, Unchecked, fate, inputs
from vllm_aiter_mla.kernels import absorb
from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.inputs import DecodeInputs, LayerShape
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.selfcheck import SelfCheckResult, self_check

pytestmark = [pytest.mark.mutation("I6"), pytest.mark.usefixtures("fake_gfx942")]
PLATFORM = Platform("gfx942", ROCM)
ALL = ("q nope", "q rope", "kv nope", "kv rope")


def check(backend: AiterBackend, nope: int = 16) -> SelfCheckResult:
    return self_check(backend, LayerShape(4, nope, FP8["gfx942"], FP8["gfx942"], 16, False))


def wrong_parts(result: SelfCheckResult) -> set[str]:
    assert not result.ok
    return {name for name, found in result.differences.items() if found.steps}


def test_mutation_none_planted_passes() -> None:
    assert check(AiterBackend(PLATFORM)).ok


def test_mutation_strided_table_halves_are_caught_by_the_self_check() -> None:
    bound = AiterBackend(PLATFORM)
    bound.halves = lambda table: table.chunk(2, -1)  # no .contiguous()
    assert wrong_parts(check(bound)) == {"q rope", "kv rope"}


def test_mutation_a_uint8_cache_is_caught_by_the_contract_or_kills() -> None:
    operands = inputs(query="act")
    operands = replace(operands, kv_cache=operands.kv_cache.view(torch.uint8))
    assert str(AiterBackend(PLATFORM).refuse(operands)).startswith("kv_cache: view uint8")
    outcome = fate(lambda: Unchecked().prepare(operands))
    assert outcome == "SIGABRT: [AITER] kv cache data type is not supported\n"


def test_mutation_a_4d_cache_is_caught_by_the_contract_or_writes_elsewhere() -> None:
    operands = inputs()
    operands = replace(operands, kv_cache=operands.kv_cache.unsqueeze(1))
    assert str(AiterBackend(PLATFORM).refuse(operands)).startswith("kv_cache: [blocks, block_size, 576]")
    # Read as block size 1, slot s lands at block s: beyond the cache for all but the first few.
    assert fate(lambda: Unchecked().prepare(operands)).startswith("SIGABRT: Memory access fault by GPU: a KV row")


def test_mutation_int32_slots_are_caught_by_the_contract_or_read_as_pairs() -> None:
    operands = inputs()
    wrong = replace(operands, slot_mapping=operands.slot_mapping.int())
    assert str(AiterBackend(PLATFORM).refuse(wrong)).startswith("slot_mapping: torch.int64")
    assert fate(lambda: Unchecked().prepare(wrong)).startswith("SIGABRT: Memory access fault by GPU: slot_mapping")


def test_mutation_scales_applied_twice_are_caught_by_the_self_check() -> None:
    class Twice(AiterBackend):
        def prepare(self, operands: DecodeInputs) -> torch.Tensor:
            return super().prepare(replace(operands, q_scale=operands.q_scale**2, k_scale=operands.k_scale**2))

    assert wrong_parts(check(Twice(PLATFORM))) == set(ALL)


def test_mutation_reciprocal_scales_are_caught_by_the_self_check() -> None:
    class Inverse(AiterBackend):
        def prepare(self, operands: DecodeInputs) -> torch.Tensor:
            return super().prepare(replace(operands, q_scale=1 / operands.q_scale, k_scale=1 / operands.k_scale))

    assert wrong_parts(check(Inverse(PLATFORM))) == set(ALL)


def test_mutation_an_unabsorbed_query_kills_or_is_caught_by_the_self_check(monkeypatch) -> None:
    monkeypatch.setattr(absorb, "absorb_plain", lambda q_nope, w_uk_t: q_nope.contiguous())
    bound, operands = AiterBackend(PLATFORM), inputs(nope=128)
    assert fate(lambda: bound.prepare(operands)).startswith("SIGABRT: [AITER] check failed: q_out.size(2)")


def test_mutation_an_unabsorbed_query_of_the_latent_width_is_caught_by_the_self_check(monkeypatch) -> None:
    honest = absorb.absorb_plain

    class Unabsorbed(AiterBackend):
        def prepare(self, operands: DecodeInputs) -> torch.Tensor:
            monkeypatch.setattr(absorb, "absorb_plain", lambda q_nope, w_uk_t: q_nope.contiguous())
            out = super().prepare(operands)
            monkeypatch.setattr(absorb, "absorb_plain", honest)
            return out

    assert wrong_parts(check(Unabsorbed(PLATFORM), nope=512)) == {"q nope"}


def test_mutation_stale_rows_read_are_caught_by_the_self_check() -> None:
    """Without the flag for all rows, a padded row's query is never written: the poisoned row differs."""

    class Stale(AiterBackend):
        def __init__(self) -> None:
            super().__init__(PLATFORM)
            honest = self._op
            self._op = lambda *arguments: honest(*arguments[:-1], False)

    assert wrong_parts(check(Stale())) == {"q nope", "q rope"}


def test_mutation_rows_beyond_the_slots_taken_for_defined_are_caught() -> None:
    """The same, for rows that have no slot at all: a consumer that believes T instead of S reads poison."""

    class Boastful(AiterBackend):
        def prepare(self, operands: DecodeInputs) -> torch.Tensor:
            return super().prepare(replace(operands, slot_mapping=operands.slot_mapping[:2]))

        def defined_rows(self, operands: DecodeInputs) -> int:
            return operands.num_tokens

    assert {"q nope", "q rope"} <= wrong_parts(check(Boastful(PLATFORM)))


def test_mutation_the_other_rotary_style_is_caught_by_the_self_check() -> None:
    class Style(AiterBackend):
        def prepare(self, operands: DecodeInputs) -> torch.Tensor:
            return super().prepare(replace(operands, is_neox=not operands.is_neox))

    assert wrong_parts(check(Style(PLATFORM))) == {"q rope", "kv rope"}
