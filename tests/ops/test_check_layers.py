"""The self-check at start-up: a kernel that is wrong, one that raises, and a layer that nobody rewrites."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.ops.opcalls import layer_of
from tests.passes.stubs import BLOCK_SIZE, StubLayer
from vllm_aiter_mla import layers as decided
from vllm_aiter_mla import worker
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.kernels import reference, select
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend
from vllm_aiter_mla.kernels.inputs import DecodeInputs, contract_violation, synthetic_inputs
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
    return decided.decide(layer, is_neox=True).kernel


def test_a_right_kernel_is_kept_and_warmed_for_the_captured_sizes(monkeypatch, said) -> None:
    candidate = Candidate()
    layers = layers_on(candidate, monkeypatch)
    worker.check_layers(layers, strict=True, capture_sizes=[1, 8])
    assert candidate.warmed == (1, 8)
    assert chosen(layers["layers.0"]) == "triton"
    assert [level for level, _ in said if level > logging.DEBUG] == []


def test_layers_of_one_shape_are_checked_once(monkeypatch, said) -> None:
    candidate = Candidate()
    layers = layers_on(candidate, monkeypatch)
    worker.check_layers({"one": layers["layers.0"]}, strict=True)
    once, candidate.launches = candidate.launches, 0
    worker.check_layers(layers, strict=True)
    assert candidate.launches == once


@pytest.mark.parametrize(
    ("candidate", "why"),
    [(Wrong(), "q nope"), (Raising(), "HIP error: invalid device function"), (NotWarming(), "out of shared memory")],
    ids=lambda given: type(given).__name__,
)
def test_a_kernel_that_fails_is_rejected_and_in_strict_mode_an_error(monkeypatch, said, candidate, why) -> None:
    layers = layers_on(candidate, monkeypatch)
    with pytest.raises(SettingsError, match="strict=true") as raised:
        worker.check_layers(layers, strict=True, capture_sizes=[1])
    assert why in str(raised.value)
    worker.check_layers(layers, strict=False, capture_sizes=[1])
    assert chosen(layers["layers.0"]) == "reference"
    errors = [text for level, text in said if level == logging.ERROR]
    assert errors
    assert all("self-check FAILED" in text and why in text and "falls back" in text for text in errors)


def test_a_failed_check_reaches_a_plan_that_was_made_before_it(monkeypatch, said) -> None:
    layers = layers_on(Wrong(), monkeypatch)
    assert chosen(layers["layers.0"]) == "triton"
    worker.check_layers(layers, strict=False)
    assert chosen(layers["layers.0"]) == "reference"


def test_a_layer_that_admission_refuses_is_not_checked_and_hides_no_other(monkeypatch, said) -> None:
    """An fp4 weight beside an fp8 switch has no shape that a check could be made for."""
    spoilt = {"is_aiter_triton_fp4_bmm_enabled": True, "W_UK_T": torch.zeros(2, 8, 32, dtype=torch.uint8)}
    layers = layers_on(Wrong(), monkeypatch, **spoilt)
    worker.check_layers(layers, strict=False)
    assert chosen(layers["layers.1"]) == "reference"


def test_a_layer_that_cannot_be_asked_hides_no_other(monkeypatch, said) -> None:
    """The passes leave it alone; the wrong kernel of its neighbour must still be found."""
    layers = layers_on(Wrong(), monkeypatch)
    del layers["layers.0"].qk_nope_head_dim
    worker.check_layers(layers, strict=False)
    assert chosen(layers["layers.1"]) == "reference"
    outcomes = worker.cache_key(layers)
    assert len(outcomes) == 3
    assert outcomes[-1] == "layers.0: unchecked"


def test_outcomes_tell_an_engine_with_the_kernel_from_one_without(monkeypatch, said) -> None:
    """They are part of the compile cache's key: a graph left alone for want of a kernel must not outlive the want."""
    layers = layers_on(Candidate(), monkeypatch)
    usable = worker.cache_key(layers)
    assert usable == worker.cache_key(layers)
    assert len(usable) == 2, "both rotary styles of one shape"
    decided.reset()
    monkeypatch.setitem(select.FACTORIES, "triton", lambda platform: "not installed")
    absent = worker.cache_key(layers)
    assert "kernel_" in absent[0]
    assert "not installed" not in absent[0], "what a message says may differ at every start"
    decided.reset()
    failed = layers_on(Wrong(), monkeypatch)
    worker.check_layers(failed, strict=False)
    assert usable not in (absent, worker.cache_key(failed))


def test_outcomes_hold_no_index_of_a_card() -> None:
    assert all("device='cpu'" in line and f"block_size={BLOCK_SIZE}" in line for line in _outcomes_of_one())


def _outcomes_of_one() -> tuple[str, ...]:
    return worker.cache_key({"one": layer_of()})


def failing_at(call: int, real: Any) -> Any:
    """``real``, but its ``call``-th call (from 0 on) raises as a full card does."""
    calls = iter(range(1000))

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise torch.OutOfMemoryError("planted")
        return real(*args, **kwargs)

    return sometimes


def prepared_by_the_candidate(layer: StubLayer, candidate: Candidate) -> bool:
    """Whether the op's own path runs it for ``layer``."""
    shape = decided.shape_of(layer, is_neox=True)
    candidate.launches = 0
    inputs = synthetic_inputs(shape)
    _, run = decided.kernel_for(layer, inputs)
    if run is not None:
        run(inputs)
    return candidate.launches > 0


@pytest.mark.parametrize("call", range(4))
def test_fail_closed_rows_that_cannot_be_made_cost_that_layer_its_kernel_and_no_other(monkeypatch, said, call) -> None:
    """Neither the passes' question nor the op's call reaches a kernel that was not checked."""
    candidate = Candidate()
    layers = layers_on(candidate, monkeypatch)
    monkeypatch.setattr(decided, "synthetic_inputs", failing_at(call, synthetic_inputs))
    worker.check_layers(layers, strict=False)
    unchecked = {name for name, layer in layers.items() if decided.why_unchecked(layer)}
    # Both rotary styles of the first layer are decided on and checked by the fourth call; the second is of its kind.
    assert unchecked == {"layers.0"}
    for name, layer in layers.items():
        assert chosen(layer) == ("reference" if name in unchecked else "triton")
        assert prepared_by_the_candidate(layer, candidate) == (name not in unchecked)
    assert [level for level, _ in said if level > logging.DEBUG] == [logging.ERROR] * len(unchecked)


def test_fail_closed_a_check_that_raised_is_made_again_for_the_next_layer_of_the_kind(monkeypatch, said) -> None:
    """A kind whose check raised must not pass for checked."""
    layers = layers_on(Wrong(), monkeypatch)
    monkeypatch.setattr(decided, "synthetic_inputs", failing_at(0, synthetic_inputs))
    worker.check_layers(layers, strict=False)
    assert {chosen(layer) for layer in layers.values()} == {"reference"}
    assert decided.why_unchecked(layers["layers.1"]) is None, "it was rejected by its shape"


def test_fail_closed_many_layers_that_cannot_be_checked_are_one_line(monkeypatch, said) -> None:
    layers = layers_on(Candidate(), monkeypatch)
    monkeypatch.setattr(decided, "_kernel_for", lambda *args: (_ for _ in ()).throw(KeyError("planted")))
    worker.check_layers(layers, strict=False)
    (line,) = [text for level, text in said if level > logging.DEBUG]
    assert line.startswith("2 MLA layer(s) fall back to vLLM's own kernels: layers.0: ")


def test_fail_closed_a_kernel_without_memory_for_its_check_is_rejected(monkeypatch, said) -> None:
    class Hungry(Candidate):
        def run(self, inputs: DecodeInputs) -> torch.Tensor:
            raise torch.OutOfMemoryError("HIP out of memory")

    layers = layers_on(Hungry(), monkeypatch)
    with pytest.raises(SettingsError, match="HIP out of memory"):
        worker.check_layers(layers, strict=True)
    worker.check_layers(layers, strict=False)
    assert {chosen(layer) for layer in layers.values()} == {"reference"}


@pytest.mark.parametrize("broken", ["decide", "_of"])
def test_fail_closed_outcomes_that_cannot_be_asked_for(monkeypatch, said, broken) -> None:
    layers = layers_on(Candidate(), monkeypatch)
    worker.check_layers(layers, strict=False)
    with monkeypatch.context() as patching:
        patching.setattr(decided, broken, lambda *args, **kwargs: (_ for _ in ()).throw(KeyError("planted")))
        with pytest.raises(SettingsError, match="planted"):
            worker.cache_key({"one": layer_of()}, strict=True)
        found = worker.cache_key(layers)
    assert all(line.endswith(": unchecked") for line in found)
    assert {chosen(layer) for layer in layers.values()} == {"reference"}


def test_fail_closed_a_layer_that_was_refused_at_the_check_stays_unchecked(monkeypatch, said) -> None:
    layers = layers_on(Candidate(), monkeypatch)
    layers["layers.0"].sliding_window = 128
    worker.check_layers(layers, strict=True)
    layers["layers.0"].sliding_window = None
    assert [chosen(layer) for layer in layers.values()] == ["reference", "triton"]


def test_fail_closed_a_layer_that_was_never_checked_runs_no_kernel_that_needs_a_check(monkeypatch, said) -> None:
    """An artifact from a cache folder of the user's may hold the op in a process whose start-up hook never ran."""
    candidate = Candidate()
    layers = layers_on(candidate, monkeypatch)
    assert not prepared_by_the_candidate(layers["layers.0"], candidate)
    worker.check_layers({"layers.0": layers["layers.0"]}, strict=True)
    assert prepared_by_the_candidate(layers["layers.0"], candidate)
    assert not prepared_by_the_candidate(layers["layers.1"], candidate)


@pytest.mark.mutation
def test_mutation_fail_closed_a_raising_check_counts_as_made(monkeypatch, said) -> None:
    """The former way: the exception is noted, and the layer goes on with its kernel."""
    monkeypatch.setattr(decided, "distrust", lambda *args: None)
    with pytest.raises(AssertionError):
        test_fail_closed_rows_that_cannot_be_made_cost_that_layer_its_kernel_and_no_other(monkeypatch, said, 0)
