"""Planted faults: each is caught by its case, and the parts that catch them are needed."""

import pytest
import torch

from tests.verify.faults import FAULTS, Changed, Saturating
from vllm_aiter_mla.kernels.backend import OWN_BMM
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.verify import layer, oracles
from vllm_aiter_mla.verify.engine import EagerEngine


@pytest.mark.mutation
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_mutation_a_planted_fault_is_caught_by_its_case(caught, fault):
    assert fault.oracle in caught(fault.name)


@pytest.mark.parametrize(("case", "right"), sorted({(fault.case, fault.right) for fault in FAULTS}, key=str))
def test_the_cases_that_catch_faults_pass_without_them(run, case, right):
    assert run(case, right()).status == "passed"


class Forgetful(EagerEngine):
    """Runs Python again at every replay, and so emulates no capture."""

    def capture(self, step, pool, side_stream):
        captured = super().capture(step, pool, side_stream)
        kept = dict(step.outputs)

        def replay():
            step.run()
            for name, tensor in step.outputs.items():
                if name in kept:
                    kept[name].copy_(tensor)

        return captured._replace(segments=[captured.graphs[0]._replace(run=replay)], outputs=kept)


@pytest.mark.mutation
def test_mutation_without_frozen_python_a_captured_branch_goes_unnoticed(caught):
    assert "attention-output" in caught("captured-in-a-piece")
    assert caught("captured-in-a-piece", engine=Forgetful()) == {"shape-and-dtype"}


@pytest.mark.mutation
@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault.case.startswith("padding-is")], ids=lambda fault: fault.name
)
def test_mutation_with_tame_padding_a_padded_row_reaches_a_real_one_unnoticed(broken, monkeypatch, fault):
    assert broken(fault.case, fault.plant(monkeypatch), padding=None) == set()


@pytest.mark.mutation
@pytest.mark.parametrize("name", ["write-outside-slot", "writes-slot-minus-one", "write-outside-slot-each-97th"])
def test_mutation_without_the_look_elsewhere_stray_writes_go_unnoticed(caught, monkeypatch, name):
    monkeypatch.setattr(oracles, "_written_elsewhere", lambda *arguments: iter(()))
    assert caught(name) == set()


@pytest.mark.mutation
@pytest.mark.parametrize("name", [f"{field}-of-the-first-layer" for field in ("k_scale", "q_scale")])
def test_mutation_without_own_scales_those_of_another_layer_go_unnoticed(caught, monkeypatch, name):
    assert caught(name)
    monkeypatch.setattr(layer, "own_scale", lambda index: 1)
    assert caught(name) == set()


def test_a_back_end_with_a_bmm_of_its_own_may_be_a_step_off_and_the_reference_may_not(broken):
    def nudge(right, inputs):
        prepared = right(inputs)
        prepared.view(torch.uint8)[0, 0, :1] ^= 1  # a neighbour in fp8
        return prepared

    class OwnProduct(Changed):
        bounds = OWN_BMM

    assert "query-nope" in broken("fresh-data", Changed(nudge))
    assert broken("fresh-data", OwnProduct(nudge)) == set()


@pytest.mark.parametrize("variant", ["fp8", "fp8-cache"])
@pytest.mark.parametrize(("right", "noted"), [(ReferenceBackend, True), (Saturating, False)])
def test_an_overflow_that_becomes_nan_is_noted_wherever_it_is(run, variant, right, noted):
    """A bf16 query has no fp8 overflow: over an fp8 cache only the KV rows show it."""
    result = run("fp8-overflow", right(), variant)
    assert (result.status, result.writes_nan) == ("passed", noted)


def test_a_failure_holds_the_step_that_showed_it(run):
    (fault,) = (fault for fault in FAULTS if fault.name == "stale-scale")
    assert run("scales-changed", fault.plant(None)).findings[0].step.startswith("step 3: Eager")


@pytest.mark.slow
def test_memory_growth_is_told_from_a_temporary(broken):
    def with_temporary(right, inputs):
        torch.empty(1000)
        return right(inputs)

    assert broken("long-run-piecewise", Changed(with_temporary)) == set()
