# SPDX-License-Identifier: Apache-2.0
"""A process of its own for what touches a card: AITER's checks end a process by an abort.

``python -m vllm_aiter_mla.commands.check.process ASKED ANSWER`` is such a process.
"""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TIMEOUT_S = 3600  # a first start of AITER compiles for minutes
LAST_LINES = 12


class EndedError(RuntimeError):
    """A process ended without an answer: its arguments are how, and the last lines that it said."""


def call(function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] = os.environ) -> Any:
    """Return what a module's function returns, called in a process of its own.

    Raises:
        EndedError: the process ended without an answer, by an exception or otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="aiter-mla-check-") as work:
        asked, answer = Path(work) / "asked", Path(work) / "answer"
        asked.write_bytes(pickle.dumps((function, arguments)))
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__, str(asked), str(answer)], env=environment, text=True,
                errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
            code, last = done.returncode, done.stdout.splitlines()[-LAST_LINES:]
            how = f"ended with status {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        except subprocess.TimeoutExpired:
            how, last = f"had not ended after {TIMEOUT_S} s", []
        if answer.is_file():
            return pickle.loads(answer.read_bytes())
    raise EndedError(how, *last)


def main(asked: str, answer: str) -> None:
    """Call the function that is asked for and write what it returns."""
    function, arguments = pickle.loads(Path(asked).read_bytes())
    Path(answer).write_bytes(pickle.dumps(function(*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
