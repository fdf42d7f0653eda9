"""A pytest plugin: what needs vLLM is skipped where there is none, as on a bare card. Another failure stays one."""

from importlib.util import find_spec

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Skip a file or a folder whose import of vLLM fails because it is not installed."""
    report = yield
    if report.failed and find_spec("vllm") is None and wants_vllm(report.call.excinfo.value):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, "Skipped: vLLM is not installed here")
    return report


def wants_vllm(error):
    """Return whether an error of collecting is an import of vLLM, of a test file or of a folder's conftest."""
    cause = error.__cause__
    return isinstance(cause, ModuleNotFoundError) and str(cause.name).partition(".")[0] == "vllm"
