# SPDX-License-Identifier: Apache-2.0
"""A step of ``check`` in a process of its own.

``python -m vllm_aiter_mla.commands.check.child STEP ASKED OUTCOME`` runs one.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from vllm_aiter_mla import files
from vllm_aiter_mla.commands.check import process, steps
from vllm_aiter_mla.commands.check.steps import Context, Step
from vllm_aiter_mla.commands.plan.model import Source
from vllm_aiter_mla.commands.plan.record import Plan


@dataclass(frozen=True)
class Asked:
    """What such a step needs to know."""

    plan: Plan
    on_cpu: bool


def run(name: str, context: Context) -> Step:
    """Run the step ``name``; it has failed if its process ends without an outcome."""
    with tempfile.TemporaryDirectory(prefix="aiter-mla-check-") as work:
        asked, outcome = Path(work) / "asked.json", Path(work) / "outcome.json"
        files.write(asked, Asked(context.plan, context.on_cpu))
        how, *last = process.run(__name__, (name, str(asked), str(outcome)))
        if outcome.is_file():
            return files.part(Step, outcome, files.load(outcome))
    return Step("failed", f"its process {how}", tuple(last))


def main(name: str, asked: str, outcome: str) -> None:
    """Run one step and write its outcome."""
    given = files.part(Asked, Path(asked), files.load(Path(asked)))
    context = Context(Source("", "", {}), on_cpu=given.on_cpu)
    context.plan = given.plan
    files.write(Path(outcome), steps.STEPS[name](context))


if __name__ == "__main__":
    main(*sys.argv[1:])
