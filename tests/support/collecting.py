"""A pytest plugin for a bare card: a test that imports vLLM is skipped where there is none. Other failures stay."""

from importlib.util import find_spec

import pytest

ABSENT = ("vllm", "openai", "prometheus_client", "matplotlib", "jinja2")
"""vLLM, what comes with it, and what the extra ``report`` brings."""


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
    """Return the report as one of a skipped test, if what failed is an import of what a bare card lacks."""
    name = str(getattr(error, "name", "")) if isinstance(error, ModuleNotFoundError) else ""
    package = name.partition(".")[0]
    if package in ABSENT and find_spec("vllm") is None:
        report.outcome, report.longrepr = "skipped", (str(path), 0, f"Skipped: {package} is not installed here")
    return report
