"""Small runs of ``verify``, faults planted into them, and the recorded dumps."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.one_thread import one_thread as one_thread
from tests.verify.faults import FAULTS
from vllm_aiter_mla.verify import cases, runner, session
from vllm_aiter_mla.verify.engine import EagerEngine

LIMIT = 12
BY_NAME = {fault.name: fault for fault in FAULTS}


@pytest.fixture
def dump():
    return lambda name: (Path(__file__).parent / "data" / f"{name}.dot").read_text()


@pytest.fixture
def backend():
    """The reference, as ``verify`` runs it."""
    return session.find("reference")


@pytest.fixture
def run():
    """Run one case by name, replayed eagerly: ``run("fresh-data", backend, variant="fp8")``."""
    by_name = {case.name: case for case in cases.cases(LIMIT)}
    kinds = {kind.name: kind for kind in cases.variants(False, torch.float8_e4m3fn, quick=False)}

    def run_one(name, backend, variant="fp8", engine=None, seed=0, sizes=None, **change):
        case, geometry = replace(by_name[name], **change), replace(cases.SMALL, **sizes or {})
        item = cases.Item("reference", case, kinds[variant], geometry, LIMIT, seed, soak=100)
        return runner.run_case(item, backend, engine or EagerEngine())

    return run_one


@pytest.fixture
def broken(run):
    """Run one case and return the names of the oracles that it broke."""
    return lambda *given, **named: {finding.oracle for finding in run(*given, **named).findings}


@pytest.fixture
def caught(broken, monkeypatch):
    """Plant a fault by its name and return what its case, or another one, breaks."""

    def plant_and_run(name, case=None, engine=None):
        fault = BY_NAME[name]
        with monkeypatch.context() as patch:
            return broken(case or fault.case, fault.plant(patch), engine=engine, **fault.change())

    return plant_and_run
