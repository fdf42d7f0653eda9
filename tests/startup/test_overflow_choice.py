"""I14: which kernel serves an fp8 cache, by what the self-check saw an fp8 overflow become."""

import logging
import re

import pytest

from tests.support.opcalls import layer_of
from tests.support.statuses import record_with
from tests.support.worker import check
from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.backend import Binding
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.serving import decision
from vllm_aiter_mla.serving.backends import Backends
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.settings import Settings, SettingsError
from vllm_aiter_mla.startup import comparison
from vllm_aiter_mla.status.line import status_line

CLAMPS, OVERFLOWS, WRONG = reference.TRITON, reference.AITER, reference.VLLM_KERNEL


class Kernel(ReferenceBackend):
    """The reference under another name; what it declares is not always what it does."""

    def __init__(self, name, does, declares):
        super().__init__(does)
        self.name, self.declares, self.trusted = name, declares, name == "vllm"

    def bind(self, inputs):
        bound = super().bind(inputs)
        return bound if isinstance(bound, str) else Binding(bound.run, numerics=self.declares)


def started(kernel, aiter, triton=CLAMPS, cache="fp8", strict=True):
    """A layer on a made-up gfx942 after its kernels were checked."""
    kernels = {"aiter": (aiter, OVERFLOWS), "triton": (triton, CLAMPS), "vllm": (reference.VLLM_KERNEL,) * 2}
    factories = {name: lambda card, options, name=name: Kernel(name, *kernels[name]) for name in kernels}
    settings = Settings(enabled=True, kernel=kernel)
    one = Layer(layer_of(cache), Backends(settings, Platform("gfx942"), factories))
    check([one], strict=strict)
    return one


def runs(one):
    assert one.why_skipped() is None
    return one.decision.kernel_at(4)


@pytest.mark.parametrize(
    ("kernel", "aiter", "cache", "wanted", "timed"),
    [
        ("auto", OVERFLOWS, "fp8", "triton", ["triton", "vllm"]),
        ("auto", CLAMPS, "fp8", "aiter", ["aiter", "triton", "vllm"]),
        ("auto", OVERFLOWS, "auto", "aiter", ["aiter", "triton", "vllm"]),
        ("triton", OVERFLOWS, "fp8", "triton", ["triton"]),
        ("aiter", CLAMPS, "fp8", "aiter", ["aiter"]),
    ],
)
def test_overflow_decides_what_auto_takes_and_times(said, kernel, aiter, cache, wanted, timed):
    one = started(kernel, aiter, cache=cache)
    assert runs(one) == wanted
    assert list(one.usable()) == timed
    assert {level for level, _ in said} <= {logging.DEBUG, logging.INFO}


def test_overflow_of_a_kernel_that_was_named_is_one_warning_and_stays_in_the_status(said):
    layers_ = [started("aiter", OVERFLOWS) for _ in range(3)]
    assert [runs(one) for one in layers_] == ["aiter"] * 3
    (line,) = said.at(logging.WARNING)
    assert "NaN" in line
    found = record_with(layers_[-1], "aiter")
    assert found.nan_kernels == ("aiter",)
    assert status_line(found).count("NaN") == 1


def test_overflow_that_auto_avoids_is_not_in_the_status(said):
    found = record_with(started("auto", OVERFLOWS), "triton")
    assert found.nan_kernels == ()
    assert "NaN" not in status_line(found)


@pytest.mark.mutation("I14")
def test_mutation_overflow_a_triton_kernel_that_does_not_saturate_serves_nothing(said):
    one = started("auto", OVERFLOWS, triton=OVERFLOWS, strict=False)
    assert one.why_skipped().code == "kernel_shape"
    assert list(one.usable()) == ["vllm"]
    assert re.search(r"triton: self-check FAILED: .*q rope [1-9].*kv rope [1-9]", said.at(logging.ERROR)[0])


@pytest.mark.parametrize(
    ("aiter", "triton", "stops"),
    [
        (OVERFLOWS, OVERFLOWS, "triton: self-check FAILED"),
        (WRONG, CLAMPS, "aiter: self-check FAILED"),
        (CLAMPS, OVERFLOWS, None),
    ],
    ids=["the only one that may run", "the first", "one that would not have run"],
)
def test_strict_wrong_kernel_ends_the_start_if_it_would_have_served_whichever_was_checked_first(
    said, aiter, triton, stops
):
    if stops is None:
        assert runs(started("auto", aiter, triton)) == "aiter"
        assert [text for text in said.at(logging.WARNING) if text.endswith("it does not run")]
        return
    with pytest.raises(SettingsError, match=stops):
        started("auto", aiter, triton)


@pytest.mark.mutation("I12")
def test_mutation_strict_wrong_kernel_only_the_first_that_was_checked_ends_a_start(said, monkeypatch):
    """Also with AITER's kernels in front of it, which are left out because they overflow."""
    monkeypatch.setattr(decision, "would_serve", lambda name, facts, checks, settings: name == next(iter(checks)))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_strict_wrong_kernel_ends_the_start_if_it_would_have_served_whichever_was_checked_first(
            said, OVERFLOWS, OVERFLOWS, "triton"
        )
    assert [text for text in said.at(logging.WARNING) if "triton: self-check FAILED" in text]


@pytest.mark.mutation("I14")
def test_mutation_overflow_rows_left_out_of_the_self_check_let_auto_take_aiter(said, monkeypatch):
    monkeypatch.setattr(comparison, "_overflow_first_row", lambda inputs: None)
    assert runs(started("auto", OVERFLOWS)) == "aiter", "so the test above sees the rows"
