"""One decision per layer: made once, the same for whoever asks, and taken back when a check fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ops.opcalls import layer_of
from vllm_aiter_mla import layers
from vllm_aiter_mla.kernels import absorb


@pytest.fixture(autouse=True)
def fresh() -> Any:
    layers.reset()
    yield
    layers.reset()


def test_a_decision_is_made_once_and_is_the_same_for_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    module, made = layer_of(), []
    real = layers._decide
    monkeypatch.setattr(layers, "_decide", lambda *args: (made.append(args), real(*args))[1])
    first = layers.decide(module, is_neox=True)
    assert layers.decide(module, is_neox=True) is first
    assert (first.kernel, first.skip, first.is_left_to_vllm) == ("reference", None, False)
    assert len(made) == 1


def test_layers_of_one_engine_share_its_back_ends() -> None:
    one, other = layer_of(), layer_of()
    assert layers.selector_of(one) is layers.selector_of(other)


def test_a_graph_in_another_dtype_than_the_checked_one_is_left_to_vllm() -> None:
    decision = layers.decide(layer_of(), is_neox=False, act=torch.float16)
    assert decision.is_left_to_vllm
    assert decision.skip is not None
    assert decision.skip.code == "activation_dtype"
    assert "float16" in decision.skip.message


def test_a_layer_that_is_distrusted_keeps_no_kernel_that_needs_a_check() -> None:
    module, neighbour = layer_of(), layer_of()
    for one in (module, neighbour):
        one._vllm_config.additional_config["aiter_mla"]["kernel"] = "triton"
    layers.distrust("planted", module)
    assert layers.why_unchecked(module) == "planted"
    assert layers.why_unchecked(neighbour) is None
    decision = layers.decide(module, is_neox=True)
    assert decision.kernel == "reference"
    assert decision.skip is not None
    assert decision.skip.message == "planted"


def test_a_gemm_that_is_missing_is_no_matter_of_a_kernel_that_does_not_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = layer_of()
    made = absorb.make(module.W_UK_T, ("fp8", torch.float8_e4m3fn))
    module.is_aiter_triton_fp8_bmm_enabled, module.W_K, module.W_K_scale = True, made.values, made.scale
    module._vllm_config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    monkeypatch.setattr(absorb.AbsorbWeight, "missing", lambda weight: "planted")
    assert layers.weight_of(module).missing() == "planted"
    decision = layers.decide(module, is_neox=True)
    assert (decision.kernel, decision.skip) == ("reference", None)


def test_the_cache_key_names_no_card_index_and_both_rotary_styles() -> None:
    found = layers.key_of(layer_of())
    assert len(found) == 2
    assert all("device='cpu'" in line for line in found)


@pytest.mark.mutation
def test_mutation_a_decision_that_outlives_its_demotion_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_forget_decisions", lambda: None)
    module = layer_of()
    module._vllm_config.additional_config["aiter_mla"]["kernel"] = "triton"
    before = layers.decide(module, is_neox=True)
    layers.distrust("planted", module)
    assert layers.decide(module, is_neox=True) is before, "the stale decision is still handed out"
    with pytest.raises(AssertionError):
        assert layers.decide(module, is_neox=True).kernel == "reference"
