"""``verify`` with real graphs: ``pytest -m gpu -k verify``."""

from dataclasses import replace

import pytest

from tests.verify.faults import FAULTS
from vllm_aiter_mla.kernels.platform import detect_platform
from vllm_aiter_mla.verify import PASSED, session
from vllm_aiter_mla.verify.cases import REAL, Item, cases, variants
from vllm_aiter_mla.verify.runner import run_case

pytestmark = pytest.mark.gpu


def ran(**asked):
    found = session.Session(**asked)
    list(found.run())
    return found


@pytest.mark.parametrize("name", list(session.FINDERS))
def test_verify_gpu_every_back_end_here_passes(name):
    found = ran(backend=(name,), quick=True)
    if name in found.missing:
        pytest.skip(found.missing[name])
    failed = [(r.case, r.variant, r.findings) for r in found.results if r.status == "failed"]
    assert failed == []
    assert found.status == PASSED
    assert found.engine.name == "graph capture"


def test_verify_gpu_status_is_read_from_the_graph():
    found = ran(backend=("triton",), case=("kernel-status",), variant=("fp8",))
    assert "1 launch: 1 x decode_prep_kernel" in found.results[0].launches.values()


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_verify_gpu_a_planted_fault_is_caught_and_the_right_back_end_passes(monkeypatch, fault):
    engine = session.engine_here()
    fp8 = variants(True, detect_platform().fp8, quick=True)[0]
    limit = session.SIZES["cpu"][1]
    (case,) = (case for case in cases(limit) if case.name == fault.case)
    item = Item("reference", case, fp8, REAL, limit, soak=100)
    assert run_case(item, fault.right(), engine).status == "passed"
    wrong = run_case(replace(item, case=replace(case, **fault.change())), fault.plant(monkeypatch), engine)
    assert fault.oracle in {finding.oracle for finding in wrong.findings}
