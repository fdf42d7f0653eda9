"""A pytest plugin: what needs vLLM is skipped where there is none, as on a bare card. Another failure stays one."""

from importlib.util import find_spec

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Skip a file or a folder whose import of vLLM fails because it is not installed."""
    report = yield
    # pytest raises its own error from that of a test file or of a folder's conftest.
    return skipped(report, collector.path, report.call.excinfo.value.__cause__) if report.failed else report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Skip a test that imports vLLM where it is not installed."""
    report = yield
    return skipped(report, item.path, call.excinfo.value) if report.failed else report


def skipped(report, path, error):
    """Return the report as one of a skipped test, if what failed is an import of vLLM where there is none."""
    name = str(getattr(error, "name", "")) if isinstance(error, ModuleNotFoundError) else ""
    if name.partition(".")[0] == "vllm" and find_spec("vllm") is None:
        report.outcome, report.longrepr = "skipped", (str(path), 0, "Skipped: vLLM is not installed here")
    return report
