"""Plans by a few long-lived processes: each imports vLLM once, and answers in a fork of its own."""

from __future__ import annotations

import atexit
import functools
import os
from pathlib import Path
from typing import Any

from vllm_aiter_mla.commands.plan import build, command, model
from vllm_aiter_mla.commands.plan.model import Vllm  # tests replace the module's

ROOT = str(Path(__file__).parents[2])
ARCH = "gfx950"


@functools.cache
def process(arch: str = ARCH, env: tuple[str, ...] = (), bug: str = "") -> Vllm:
    """The process for a card and variables, with the gate's decisions in its answers."""
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    variables = {name: value for name, (value, _) in model.environment(env, {}).items()}
    found = Vllm(arch, variables | {"PYTHONPATH": path, "PLANTED_BUG": bug}, child="tests.plan.truth_child")
    atexit.register(found.close)
    return found


@functools.cache
def asked(name: str, *arguments: str, arch: str = ARCH, env: tuple[str, ...] = (), bug: str = "") -> dict[str, Any]:
    """vLLM's answer about the model ``name``, with ``decision``: what the gate said."""
    return process(arch, env, bug).ask(model.find(name), arguments)


def planned(name: str, *arguments: str, arch: str = ARCH, env: tuple[str, ...] = (), bug: str = "") -> dict[str, Any]:
    """The plan of ``name``.

    Raises:
        ValueError: vLLM's answer is no plan.
    """
    answer, source = asked(name, *arguments, arch=arch, env=env, bug=bug), model.find(name)
    command._check_answer(name, answer)
    return build.build(source, answer, process(arch, env, bug).about, model.environment(env, {}))


def codes(plan: dict[str, Any]) -> list[str]:
    """Codes of the reasons, in order."""
    return [reason["code"] for reason in plan["reasons"]]
