# SPDX-License-Identifier: Apache-2.0
"""A process of its own for what touches a card: AITER's checks end a process by an abort."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

TIMEOUT_S = 3600  # a first start of AITER compiles for minutes
LAST_LINES = 12


def run(module: str, arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Run a module to its end, however it ends.

    Returns:
        How it ended, then the last lines that it said.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments], env=environment, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [f"had not ended after {TIMEOUT_S} s"]
    code = done.returncode
    how = f"ended with status {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
    return [how, *done.stdout.splitlines()[-LAST_LINES:]]
