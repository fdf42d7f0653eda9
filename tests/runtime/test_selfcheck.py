"""The self-check at start-up: a kernel that is wrong, one that raises, and a layer that nobody rewrites."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from passes.stubs import BLOCK_SIZE, StubLayer

from runtime.opcalls import layer_of
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.kernels import reference, select
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend
from vllm_aiter_mla.kernels.inputs import DecodeInputs, contract_violation
from vllm_aiter_mla.runtime import kernel, selfcheck
from vllm_aiter_mla.settings import SettingsError


class Candidate(KernelBackend):
    """A "triton" kernel that is the reference but for what a test plants."""

    name = "triton"
    launches = 0
    warmed: tuple[int, ...] = ()

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        return contract_violation(inputs) or Binding(self.run)

    def run(self, inputs: DecodeInputs) -> torch.Tensor:
        self.launches += 1
        return reference.prepare(inputs)

    def warm_up(self, inputs: DecodeInputs, sizes: Any) -> None:
        self.warmed = tuple(sizes)


class Wrong(Candidate):
    def run(self, inputs: DecodeInputs) -> torch.Tensor:
        return -super().run(inputs)


class Raising(Candidate):
    def run(self, inputs: DecodeInputs) -> torch.Tensor:
        raise RuntimeError("HIP error: invalid device function")


class NotWarming(Candidate):
    def warm_up(self, inputs: DecodeInputs, sizes: Any) -> None:
        raise RuntimeError("out of shared memory")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    lines: list[tuple[int, str]] = []
    monkeypatch.setattr(log, "say", lambda level, text, stacklevel=2: lines.append((level, text)))
    monkeypatch.setattr(log, "_said", set())
    return lines


def layers_on(candidate: Candidate, monkeypatch: pytest.MonkeyPatch, **spoilt: Any) -> dict[str, StubLayer]:
    """Two layers of one shape that ask for ``candidate``; the first one's attributes replaced by ``spoilt``."""
    monkeypatch.setitem(select.FACTORIES, "triton", lambda platform: candidate)
    layers = {f"layers.{index}": layer_of() for index in range(2)}
    for layer in layers.values():
        layer._vllm_config.additional_config["aiter_mla"]["kernel"] = "triton"
    for name, value in spoilt.items():
        setattr(layers["layers.0"], name, value)
    return layers


def chosen(layer: StubLayer) -> str | None:
    shape = kernel.shape_of(layer, is_neox=True, act=torch.bfloat16, out_dtype=torch.bfloat16)
    return kernel.plan(layer, shape).kernel


def test_a_right_kernel_is_kept_and_warmed_for_the_captured_sizes(monkeypatch, said) -> None:
    candidate = Candidate()
    layers = layers_on(candidate, monkeypatch)
    selfcheck.check_layers(layers, strict=True, capture_sizes=[1, 8])
    assert candidate.warmed == (1, 8)
    assert chosen(layers["layers.0"]) == "triton"
    assert [level for level, _ in said if level > logging.DEBUG] == []


def test_layers_of_one_shape_are_checked_once(monkeypatch, said) -> None:
    candidate = Candidate()
    layers = layers_on(candidate, monkeypatch)
    selfcheck.check_layers({"one": layers["layers.0"]}, strict=True)
    once, candidate.launches = candidate.launches, 0
    selfcheck.check_layers(layers, strict=True)
    assert candidate.launches == once


@pytest.mark.parametrize(
    ("candidate", "why"),
    [(Wrong(), "q nope"), (Raising(), "HIP error: invalid device function"), (NotWarming(), "out of shared memory")],
    ids=lambda given: type(given).__name__,
)
def test_a_kernel_that_fails_is_demoted_and_in_strict_mode_an_error(monkeypatch, said, candidate, why) -> None:
    layers = layers_on(candidate, monkeypatch)
    with pytest.raises(SettingsError, match="strict=true") as raised:
        selfcheck.check_layers(layers, strict=True, capture_sizes=[1])
    assert why in str(raised.value)
    selfcheck.check_layers(layers, strict=False, capture_sizes=[1])
    assert chosen(layers["layers.0"]) == "reference"
    errors = [text for level, text in said if level == logging.ERROR]
    assert errors
    assert all("self-check FAILED" in text and why in text and "falls back" in text for text in errors)


def test_a_failed_check_reaches_a_plan_that_was_made_before_it(monkeypatch, said) -> None:
    layers = layers_on(Wrong(), monkeypatch)
    assert chosen(layers["layers.0"]) == "triton"
    selfcheck.check_layers(layers, strict=False)
    assert chosen(layers["layers.0"]) == "reference"


def test_a_layer_that_admission_refuses_is_not_checked_and_hides_no_other(monkeypatch, said) -> None:
    """An fp4 weight beside an fp8 switch has no shape that a check could be made for."""
    spoilt = {"is_aiter_triton_fp4_bmm_enabled": True, "W_UK_T": torch.zeros(2, 8, 32, dtype=torch.uint8)}
    layers = layers_on(Wrong(), monkeypatch, **spoilt)
    selfcheck.check_layers(layers, strict=False)
    assert chosen(layers["layers.1"]) == "reference"


def test_a_layer_that_cannot_be_asked_hides_no_other(monkeypatch, said) -> None:
    """The passes leave it alone; the wrong kernel of its neighbour must still be found."""
    layers = layers_on(Wrong(), monkeypatch)
    del layers["layers.0"].qk_nope_head_dim
    selfcheck.check_layers(layers, strict=False)
    assert chosen(layers["layers.1"]) == "reference"
    assert len(selfcheck.verdicts(layers)) == 2


def test_verdicts_tell_an_engine_with_the_kernel_from_one_without(monkeypatch, said) -> None:
    """They are part of the compile cache's key: a graph left alone for want of a kernel must not outlive the want."""
    layers = layers_on(Candidate(), monkeypatch)
    usable = selfcheck.verdicts(layers)
    assert usable == selfcheck.verdicts(layers)
    assert len(usable) == 2, "both rotary styles of one shape"
    kernel.reset()
    monkeypatch.setitem(select.FACTORIES, "triton", lambda platform: "not installed")
    absent = selfcheck.verdicts(layers)
    assert "not installed" in absent[0]
    kernel.reset()
    failed = layers_on(Wrong(), monkeypatch)
    selfcheck.check_layers(failed, strict=False)
    assert len({usable, absent, selfcheck.verdicts(failed)}) == 3


def test_verdicts_hold_no_index_of_a_card() -> None:
    assert all("device='cpu'" in line and f"block_size={BLOCK_SIZE}" in line for line in _verdicts_of_one())


def _verdicts_of_one() -> tuple[str, ...]:
    return selfcheck.verdicts({"one": layer_of()})
