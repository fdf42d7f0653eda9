"""Planted faults: each is caught by its named case, and the parts that catch them are needed."""

from dataclasses import replace

import pytest
import torch

from tests.verify.verify_support import LIMIT, broken
from vllm_aiter_mla.kernels.backend import OWN_BMM
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.verify import backends, oracles, runner, selftest, setting
from vllm_aiter_mla.verify.cases import cases
from vllm_aiter_mla.verify.engine import Captured, EagerEngine
from vllm_aiter_mla.verify.faults import FAULTS, Fault, leaves_padded_rows

BY_NAME = {fault.name: fault for fault in FAULTS}
ASKED_FOR = {
    "captured-in-a-piece",
    "rotates-twice",
    "rotates-copies",
    "prepares-padded-rows",
    "rows-not-written-anew",
    "stale-table",
    "table-copied-per-call",
    "host-sync",
    "write-outside-slot",
    "writes-slot-minus-one",
    "mixes-padded-rows",
    "scale-baked-in",
    "allocates-on-replay",
}


def judge(fault):
    fp8 = setting.variants("cpu", torch.float8_e4m3fn, quick=True)[0]
    options = runner.Options(setting.SMALL, LIMIT)
    (outcome,) = selftest.self_test([fault], lambda: backends.load("reference"), EagerEngine(), fp8, options)
    return outcome


@pytest.mark.mutation
@pytest.mark.parametrize("name", BY_NAME)
def test_mutation_planted_fault_is_caught_by_its_case(name):
    outcome = judge(BY_NAME[name])
    assert outcome.caught, outcome.message
    assert outcome.control == ""


def test_the_list_holds_every_fault_that_was_asked_for():
    assert set(BY_NAME) >= ASKED_FOR
    assert {fault.case for fault in FAULTS} <= {case.name for case in cases(LIMIT)}
    assert {fault.oracle for fault in FAULTS} <= set(oracles.ORACLES)


def test_a_fault_that_is_none_is_reported_as_missed():
    outcome = judge(Fault("nothing", "no fault at all", "fresh-data", "query-nope", lambda subject: subject))
    assert not outcome.caught
    assert outcome.message == "passed"


def test_a_fault_in_a_wrong_control_is_not_counted_as_caught():
    wrong = BY_NAME["host-sync"].plant
    outcome = judge(Fault("twice", "wrong before it is planted", "fresh-data", "no-sync", wrong, base=wrong))
    assert outcome.caught
    assert not outcome.ok


class Forgetful(EagerEngine):
    """Runs Python again at every replay: no emulation of a capture at all."""

    def capture(self, segments, pool, side_stream):
        recorded = super().capture(segments, pool, side_stream)
        calls = [_again(segment, recorded.outputs) if segment.captured else segment.run for segment in segments]
        return Captured(calls, recorded.recorded, recorded.outputs)


def _again(segment, outputs):
    def replay():
        for name, tensor in segment.run().items():
            if name in outputs:
                outputs[name].copy_(tensor)

    return replay


@pytest.mark.mutation
def test_mutation_without_frozen_python_a_captured_branch_goes_unnoticed(run, subject):
    fault = BY_NAME["captured-in-a-piece"]
    assert "attention-output" in broken(run(fault.case, fault.plant(subject)))
    assert "attention-output" not in broken(run(fault.case, fault.plant(subject), engine=Forgetful()))


@pytest.mark.mutation
def test_mutation_without_poison_a_padded_row_may_pass_for_a_number(run, subject, monkeypatch):
    fault = BY_NAME["mixes-padded-rows"]
    assert "finite" in broken(run(fault.case, fault.plant(leaves_padded_rows(subject))))
    monkeypatch.setattr(runner, "nan_byte", lambda dtype: 0)
    assert "finite" not in broken(run(fault.case, fault.plant(leaves_padded_rows(subject))))


@pytest.mark.mutation
@pytest.mark.parametrize("name", ["write-outside-slot", "writes-slot-minus-one"])
def test_mutation_without_the_look_elsewhere_stray_writes_go_unnoticed(run, subject, monkeypatch, name):
    fault = BY_NAME[name]
    monkeypatch.setattr(oracles, "_elsewhere", lambda *arguments: iter(()))
    assert broken(run(fault.case, fault.plant(subject))) == set()


def test_a_back_end_with_a_bmm_of_its_own_may_be_a_step_off_and_the_reference_may_not(run, subject):
    def nudged(inputs):
        prepared = subject.prepare(inputs)
        steps = prepared.view(torch.uint8)
        steps[0, 0, :1] ^= 1  # a neighbour in fp8
        return prepared

    assert "query-nope" in broken(run("fresh-data", replace(subject, prepare=nudged)))

    class OwnProduct(ReferenceBackend):
        bounds = OWN_BMM

    loose = replace(subject, backend=OwnProduct(), prepare=nudged)
    assert run("fresh-data", loose).status == "passed"


def test_a_failure_holds_the_step_that_showed_it(run, subject):
    result = run("scales-changed", BY_NAME["scale-baked-in"].plant(subject))
    assert result.findings[0].step.startswith("step 3: Eager")


def test_memory_growth_is_told_from_a_temporary(run, subject):
    attend = subject.attend

    def with_temporary(*call):
        torch.empty(1000)
        attend(*call)

    assert run("long-run-piecewise", replace(subject, attend=with_temporary)).status == "passed"


def test_engines_name_what_they_are():
    assert EagerEngine().name == "eager replay"
    assert not EagerEngine().graphs
