"""The console script in a process of its own, for many command lines: what reaches vLLM of each.

``python -m tests.support.typed_child [v]`` reads a command line as JSON a line. It answers each with the exit status,
what was said on stderr, and the arguments that would go to vLLM, None if none would. ``v`` plants a short option.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from importlib.metadata import EntryPoint, entry_points
from typing import Any
from unittest import mock

import typer

NAME = "vllm-aiter-mla"


def _with_a_short_option(make: Any) -> Any:
    """Return ``typer.Option`` that gives ``--verbose`` the short name which it had."""
    return lambda *names, **how: make(*names, *["-v"] * (names[:1] == ("--verbose",)), **how)


def entry_point() -> EntryPoint:
    (found,) = entry_points(group="console_scripts", name=NAME)
    return found


def main(bug: str = "") -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with mock.patch.object(typer, "Option", _with_a_short_option(typer.Option)) if bug else contextlib.nullcontext():
        run = entry_point().load()
    from vllm_aiter_mla.commands.check import steps
    from vllm_aiter_mla.commands.plan import planner

    def plans(source: Any, asked: Any, *_: Any) -> Any:
        reached.append(list(asked[0]))
        raise ValueError("asked")

    steps.STEPS = {"plan": steps.StepSpec(steps.plan_model, needs=())}  # the others do not read the command line
    planner.make_plans = plans
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # a line may name a file to write
        for line in sys.stdin:
            reached: list[list[str]] = []
            status: Any = 0
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
                try:
                    sys.argv = [NAME, *json.loads(line)]
                    run()
                except SystemExit as end:
                    status = end.code
            answer = {"status": status, "said": said.getvalue(), "reached": reached[0] if reached else None}
            print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
