"""What ``check`` prints on stderr while it runs: a line when a step begins, and one every half a minute."""

import re

from vllm_aiter_mla.commands.check import steps

STEP = "|".join(steps.STEPS)
PROGRESS = re.compile(rf"[1-9]/[1-9] ({STEP}) \.\.\.|({STEP}), \d+ s(: .*)?")


def without_progress(stderr: str) -> list[str]:
    """Return the other lines. A test of these must not depend on how long a step takes."""
    return [line for line in stderr.splitlines() if not PROGRESS.fullmatch(line)]
