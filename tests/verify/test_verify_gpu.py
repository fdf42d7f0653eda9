"""``verify`` with real graphs: ``pytest -m gpu -k verify``."""

import pytest
import torch

from vllm_aiter_mla.verify import backends, selftest, session
from vllm_aiter_mla.verify.faults import FAULTS
from vllm_aiter_mla.verify.runner import Options
from vllm_aiter_mla.verify.setting import REAL, variants

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; torch sees none here"),
]


def ran(**asked):
    found = session.Session(session.Request(**asked))
    list(found.run())
    return found


@pytest.mark.parametrize("name", list(backends.FINDERS))
def test_verify_gpu_every_back_end_here_passes(name):
    found = ran(backend=(name,), quick=True)
    if name in found.missing:
        pytest.skip(found.missing[name])
    failed = [(r.case, r.variant, r.findings) for r in found.results if r.status == "failed"]
    assert failed == []
    assert found.status == session.PASSED
    assert found.engine.name == "graph capture"


def test_verify_gpu_inductor_records_each_size_once():
    found = ran(backend=("triton",), only=("compiled-by-inductor",))
    assert [r.findings for r in found.results if r.status == "failed"] == []


def test_verify_gpu_status_is_read_from_the_graph():
    found = ran(backend=("triton",), only=("kernel-status",), variant=("fp8",))
    assert "1 launch: 1 x decode_prep_kernel" in found.results[0].launches.values()


def test_verify_gpu_every_planted_fault_is_caught():
    engine = session.engine_here()
    fp8 = variants(engine.device, session.native_fp8(), quick=True)[0]
    outcomes = selftest.self_test(
        FAULTS, lambda: backends.load("reference"), engine, fp8, Options(REAL, session.CPU_LIMIT)
    )
    assert [(v.fault.name, v.message, v.control) for v in outcomes if not v.ok] == []
