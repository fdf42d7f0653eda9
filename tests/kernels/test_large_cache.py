"""The self-check and the timing meet the caches that serving meets: above 2 GiB, and in blocks of another size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.simulated_aiter import ROCM
from vllm_aiter_mla.kernels import measure, reference, selfcheck
from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend
from vllm_aiter_mla.kernels.inputs import LayerShape, synthetic_inputs
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.triton import launcher
from vllm_aiter_mla.kernels.triton.backend import TritonBackend

SHAPE = LayerShape(16, 128, torch.bfloat16, torch.bfloat16, 16, False)


def is_large(inputs) -> bool:
    return launcher._reach(inputs.kv_cache) >= 1 << 31


class Wrong(reference.ReferenceBackend):
    """Right but over the caches that ``where`` tells."""

    name, trusted = "wrong", False

    def __init__(self, tried, where) -> None:
        super().__init__()
        self.tried_caches, self.where = tried, where

    def bind(self, inputs):
        wrong = self.where(inputs)
        run = lambda one: reference.prepare(one) * (-1 if wrong else 1)  # noqa: E731
        return Binding(run, f"blocks of {inputs.kv_cache.shape[1]}")


@pytest.mark.parametrize("large", [False, True])
def test_a_synthetic_large_cache_is_one_to_triton_and_as_small_as_the_other(large: bool) -> None:
    inputs = synthetic_inputs(SHAPE, 3, large=large)
    assert is_large(inputs) is large
    assert inputs.kv_cache.numel() * 2 < 1 << 20


@pytest.mark.mutation
def test_a_kernel_that_is_wrong_over_a_large_cache_alone_fails_its_self_check() -> None:
    tried = TritonBackend().tried_caches
    assert selfcheck.self_check(Wrong(tried, lambda inputs: False), SHAPE).ok
    assert not selfcheck.self_check(Wrong(tried, is_large), SHAPE).ok


@pytest.mark.parametrize(("opt", "kernel"), [(False, "per-head"), (True, "opt")])
def test_another_block_size_leads_to_the_kernel_of_aiters_that_was_checked(opt: bool, kernel: str) -> None:
    """vLLM settles the block size after the check."""
    aiter = AiterBackend(Platform("gfx950", ROCM), op=lambda *_: None, opt=opt)
    caches = [synthetic_inputs(replace(SHAPE, block_size=size)) for size in (1, 16, 64)]
    assert {aiter.kernel_of(inputs) for inputs in caches} == {kernel}


def test_what_is_timed_is_the_variant_for_a_large_cache() -> None:
    weight = synthetic_inputs(SHAPE, 1).weight
    assert all(map(is_large, measure.calls_of(SHAPE, [weight], 2, resident=1)))


def test_a_back_end_without_variants_is_checked_over_the_layers_own_cache() -> None:
    assert KernelBackend.tried_caches(reference.ReferenceBackend(), 64) == ((64, False),)
