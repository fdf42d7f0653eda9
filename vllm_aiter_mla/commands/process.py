# SPDX-License-Identifier: Apache-2.0
"""A process of its own: AITER's checks end a process by an abort, and vLLM keeps much of a platform and of a config.

``python -m vllm_aiter_mla.commands.process MODULE:FUNCTION ASKED ANSWER`` is such a process.
"""

import os
import pickle
import pkgutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIMEOUT_S = 3600  # a first start of AITER compiles for minutes
LAST_LINES = 12


class EndedError(RuntimeError):
    """A process ended without an answer: its arguments are how, and the last lines that it said."""


def call(
    function: str, *arguments: Any, environment: Mapping[str, str] = os.environ, log: int = subprocess.PIPE
) -> Any:
    """Return what "module:function" returns, called in a process of its own that writes to ``log``.

    Raises:
        EndedError: the process ended without an answer, by an exception or otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="aiter-mla-") as work:
        asked, answer = Path(work) / "asked", Path(work) / "answer"
        asked.write_bytes(pickle.dumps(arguments))
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__, function, str(asked), str(answer)], env=environment, text=True,
                errors="replace", stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, timeout=TIMEOUT_S,
                check=False,
            )  # fmt: skip
            code, last = done.returncode, (done.stdout or "").splitlines()[-LAST_LINES:]
            how = f"ended with status {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        except subprocess.TimeoutExpired:
            how, last = f"had not ended after {TIMEOUT_S} s", []
        if answer.is_file():
            return pickle.loads(answer.read_bytes())
    raise EndedError(how, *last)


def main(function: str, asked: str, answer: str) -> None:
    """Call the function and write what it returns."""
    arguments = pickle.loads(Path(asked).read_bytes())
    Path(answer).write_bytes(pickle.dumps(pkgutil.resolve_name(function)(*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
