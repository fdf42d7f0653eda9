"""Small runs of ``verify``, and where its recorded dumps lie."""

from pathlib import Path

import pytest
import torch

from tests.verify.verify_support import LIMIT
from vllm_aiter_mla.verify import backends, cases, runner, setting
from vllm_aiter_mla.verify.engine import EagerEngine

DATA = Path(__file__).parent / "data"


@pytest.fixture
def dump():
    """The text of a dump by its name."""
    return lambda name: (DATA / f"{name}.dot").read_text()


@pytest.fixture
def subject():
    """The reference, as ``verify`` runs it."""
    return backends.load("reference")


@pytest.fixture
def run():
    """Run one case by name, replayed eagerly: ``run("fresh-data", subject, variant="fp8")``."""
    by_name = {case.name: case for case in cases.cases(LIMIT)}
    kinds = {kind.name: kind for kind in setting.variants("cpu", torch.float8_e4m3fn, quick=False)}

    def run_one(name, subject, variant="fp8", soak=40, engine=None, seed=0):
        options = runner.Options(setting.SMALL, LIMIT, seed, soak)
        return runner.run_case(by_name[name], kinds[variant], subject, engine or EagerEngine(), options)

    return run_one


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are tiny: threads that wait for one another on a shared machine cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
