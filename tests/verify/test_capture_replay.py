"""Captured decode at both ends of its limit: a replay gives what the eager reference gives for the inputs of now.

The cases ``both-ends`` capture graphs from one request to the whole limit. Between replays the data, positions and
slots change, each alone; a request leaves, so that its slots are -1; and the weights are replaced in place. A CPU
repeats recorded calls. On a GPU the same tests capture real graphs.
"""

from dataclasses import replace

import pytest

from tests.verify.faults import HELD
from vllm_aiter_mla.kernels.platform import detect_platform
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.verify import session
from vllm_aiter_mla.verify.cases import REAL, SMALL, Item, Replay, cases, variants
from vllm_aiter_mla.verify.runner import run_case

LIMIT, DRAFTS = session.SIZES["cpu"][1], (0, 1, 3)
GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.mark.parametrize(
    ("device", "name"),
    [("cpu", "reference"), *(pytest.param("gpu", name, marks=pytest.mark.gpu) for name in session.FINDERS)],
)
def test_a_replay_equals_the_eager_reference_at_both_ends_of_the_limit(device, name):
    found = session.Session(backend=(name,), case=("both-ends",), device="cpu" if device == "cpu" else None)
    if found.missing:
        pytest.skip(found.missing[name])
    results = list(found.run())
    assert [(one.case, one.variant, one.findings) for one in results if one.status != "passed"] == []
    assert {one.case for one in results} == {f"both-ends-{drafts}-drafts" for drafts in DRAFTS}
    for one in results:
        first = 1 + int(one.case.split("-")[2])
        assert {str(first), str(found.items[0].limit)} <= set(one.launches)


def run(device, drafts, backend, without=lambda step: False):
    """Run the case of a small limit over an fp8 cache, ``without`` some of its steps."""
    engine = session.engine_here(device)
    (case,) = (case for case in cases(LIMIT) if case.name == f"both-ends-{drafts}-drafts")
    case = replace(case, steps=tuple(step for step in case.steps if not without(step)))
    fp8 = variants(engine.device, detect_platform().fp8, quick=True)[0]
    return run_case(Item("reference", case, fp8, REAL if engine.graphs else SMALL, LIMIT), backend, engine)


@pytest.mark.mutation
@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("end", ["one request", "the limit"])
@pytest.mark.parametrize("held", HELD)
def test_mutation_a_graph_of_one_end_that_holds_what_was_is_caught(monkeypatch, device, drafts, end, held):
    size = LIMIT if end == "the limit" else 1 + drafts
    oracle, plant = HELD[held]
    found = run(device, drafts, plant(size)(monkeypatch)).findings
    assert oracle in {finding.oracle for finding in found}
    assert all(f"Replay(size={size}," in finding.step for finding in found)


def left(step):
    return isinstance(step, Replay) and step.rows is not None


@pytest.mark.mutation
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize(
    ("held", "without"),
    [
        ("old weights", lambda step: step == "weights"),
        ("old weights of v-up", lambda step: step == "weights"),
        ("slots of rows that left", left),
    ],
)
def test_mutation_without_its_change_what_a_graph_holds_goes_unnoticed(monkeypatch, drafts, held, without):
    _, plant = HELD[held]
    assert run("cpu", drafts, plant(LIMIT)(monkeypatch), without).findings == []
    assert run("cpu", drafts, ReferenceBackend(), without).findings == []
