"""Processes that hear a signal although whoever started the tests ignores it: a job in the background, nohup."""

import signal


def heard() -> None:
    """For ``Popen(preexec_fn=...)``: let SIGINT, SIGTERM and SIGHUP do what they do in a terminal."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_DFL)
