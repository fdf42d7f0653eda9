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


# What is changed, how the contract declines it, and what the simulated AITER does with it otherwise.
BROKEN = {
    "a uint8 cache": (
        lambda good: replace(good, kv_cache=good.kv_cache.view(torch.uint8), out_dtype=torch.bfloat16),
        "kv_cache: view uint8",
        "[AITER] kv cache data type is not supported\n",
    ),
    # Read as block size 1, slot s lands at block s: beyond the cache for all but the first few.
    "a 4-D cache": (
        lambda good: replace(good, kv_cache=good.kv_cache.unsqueeze(1)),
        "kv_cache: [blocks, block_size, 576]",
        "Memory access fault by GPU: a KV row",
    ),
    "int32 slots": (
        lambda good: replace(good, slot_mapping=good.slot_mapping.int()),
        "slot_mapping: torch.int64",
        "Memory access fault by GPU: slot_mapping",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_mutation_operands_are_caught_by_the_contract_or_kill(name) -> None:
    change, reason, fault = BROKEN[name]
    operands = change(inputs())
    assert str(AiterBackend(PLATFORM).refuse(operands)).startswith(reason)
    assert fate(lambda: Unchecked().prepare(operands)).startswith(f"SIGABRT: {fault}")


CHANGES = {
    "scales applied twice": (lambda x: replace(x, q_scale=x.q_scale**2, k_scale=x.k_scale**2), set(ALL)),
    "reciprocal scales": (lambda x: replace(x, q_scale=1 / x.q_scale, k_scale=1 / x.k_scale), set(ALL)),
    "the other rotary style": (lambda x: replace(x, is_neox=not x.is_neox), {"q rope", "kv rope"}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_mutation_operands_changed_on_the_way_are_caught_by_the_self_check(name) -> None:
    change, wrong = CHANGES[name]

    class Changed(AiterBackend):
        def prepare(self, operands: DecodeInputs) -> torch.Tensor:
            return super().prepare(change(operands))

    assert wrong_parts(check(Changed(PLATFORM))) == wrong


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
