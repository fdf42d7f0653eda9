"""What every tool does at a signal: it ends as by Ctrl-C, unless whoever started it ignores the signal."""

import os
import signal
import time

import pytest

from tools import common

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(params=SIGNALS, ids=lambda number: number.name)
def number(request):
    """A signal; what it does is as before afterwards."""
    before = signal.getsignal(request.param)
    yield request.param
    signal.signal(request.param, before)


def gets(number):
    """The body of a tool that a signal meets."""

    def body(argv):
        os.kill(os.getpid(), number)
        time.sleep(0.1)
        return 5

    return common.guarded("tool", body, [])


def test_a_signal_ends_a_tool_as_ctrl_c_does(number, capsys):
    signal.signal(number, signal.SIG_DFL)
    assert gets(number) == 130
    assert capsys.readouterr().err.startswith("tool: interrupted")
    assert signal.getsignal(number) == signal.SIG_DFL


def test_signals_that_are_ignored_end_no_tool(number, capsys):
    signal.signal(number, signal.SIG_IGN)
    assert gets(number) == 5
    assert capsys.readouterr().err == ""
    assert signal.getsignal(number) == signal.SIG_IGN


@pytest.mark.mutation
def test_mutation_a_signal_that_is_heard_under_nohup_is_caught(number, monkeypatch, capsys):
    monkeypatch.setattr(common.signal, "SIG_IGN", None)  # what ``guarded`` compares with
    signal.signal(number, signal.Handlers.SIG_IGN)
    with pytest.raises(AssertionError, match="130 == 5"):
        assert gets(number) == 5
