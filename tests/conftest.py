"""What holds for every test: examples do not depend on the machine's speed, and engine tests come last."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support import collecting, lanes
from tests.support.planted import Said

# Processes that tests start find the checkout: `tests`, `tools` and this tree's package.
ROOT = Path(__file__).parents[1]
if str(ROOT) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

# Inductor takes the vector unit that the processor names. Else each process that compiles starts Pythons which import
# torch to try it: ten seconds of processor time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# A deadline in milliseconds fails on a machine that does other work. Each run has the same examples.
settings.register_profile("claims", deadline=None, derandomize=True, database=None)
settings.load_profile("claims")

SUITE = pytest.StashKey[list[pytest.Item]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the tests that wait for engines last: engines start when collection ends and take minutes."""
    # Engine tests whose marker has no argument start their engines themselves and need not wait.
    items.sort(key=lambda item: bool(getattr(item.get_closest_marker("engine"), "args", ())))
    config.stash[SUITE] = list(items)


def pytest_configure(config):
    """Let folders too be skipped where vLLM is absent: pytest asks no conftest about a folder of its own."""
    config.pluginmanager.register(collecting)


def pytest_runtest_setup(item):
    """Skip the tests of a GPU where torch sees none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU; torch sees none here")


def pytest_sessionfinish(session):
    """Fail a lane of the Makefile that ran fewer tests than it should; xdist's controller has the whole count."""
    config, reporter = session.config, session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput") or getattr(config.option, "collectonly", False):
        return
    ran = sum(len(reporter.stats.get(outcome, ())) for outcome in ("passed", "failed", "xfailed", "xpassed"))
    if why := lanes.too_few(config.args, config.option.markexpr, config.option.keyword, ran):
        reporter.write_line(f"\nFAILED: {why}", red=True)
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    """Say what was skipped, one line for each reason."""
    for line in lanes.skips(terminalreporter.stats.get("skipped", ())):
        terminalreporter.write_line(line)


@pytest.fixture
def suite(request):
    """Every test of the suite, also those that this run leaves out; skips where only some folders were collected."""
    if {Path(argument).resolve() for argument in request.config.args} - {ROOT, ROOT / "tests"}:
        pytest.skip("only a part of the tests was collected")
    return request.config.stash[SUITE]


@pytest.fixture
def said(monkeypatch, tmp_path):
    """The plugin's log lines from here on, as (level, text); its files go to ``tmp_path``."""
    from vllm_aiter_mla.compat import config, log

    lines = Said()
    monkeypatch.setattr(log, "say", lambda level, text, stacklevel=2: lines.append((level, text)))
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(config, "cache_folder", lambda: tmp_path)
    return lines


@pytest.fixture
def fake_gfx942():
    """An AITER that can be imported and behaves as on an MI300X, with no call recorded."""
    from tests.sandbox.simulated_aiter import install, op

    with install("gfx942"):
        op.forget()
        yield


@pytest.fixture(params=["gfx942", "gfx950"])
def arch(request):
    """The card of an AITER that can be imported, each of the two in turn."""
    from tests.sandbox.simulated_aiter import install, op

    with install(request.param):
        op.forget()
        yield request.param
