# SPDX-License-Identifier: Apache-2.0
"""Ask vLLM about a model in a process of its own."""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.plan import issues
from vllm_aiter_mla.commands.plan.model import Source, Variables
from vllm_aiter_mla.commands.plan.record import PASSED_ON, Plan
from vllm_aiter_mla.settings import NAMESPACE

# The plan makes no connection, leaves no file, and sees the plugin where VLLM_PLUGINS leaves it out.
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
         "PYTHONSAFEPATH": "1"}  # fmt: skip


def ask_for_plans(
    source: Source, deployments: Sequence[Sequence[str]], arch: str | None, variables: Variables, verbose: bool
) -> tuple[Plan, ...]:
    """Return a plan of ``source`` for the options of ``vllm serve`` of each deployment.

    ``arch`` is the architecture to plan for, None for this machine's.

    Raises:
        ModuleNotFoundError: torch or vLLM is not installed.
        ValueError: the source is not a config, an option is wrong, or vLLM does not say enough for a plan.
        NotKnownError: vLLM could not be asked on this machine.
        RuntimeError: vLLM ends, or raises something else.
    """
    for package in ("torch", "vllm"):
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    with process.workspace(), source.folder() as folder, tempfile.TemporaryDirectory() as cache:
        try:
            of_vllm = process.call(
                plan_in_child, folder, deployments, arch, variables, environment=child_environment(variables, cache),
                log=2 if verbose else subprocess.DEVNULL,  # 2 is stderr
                expected_errors=PASSED_ON,
            )  # fmt: skip
        except process.EndedError as error:
            raise RuntimeError(f"vLLM {error.ending}; --verbose shows its log") from error
    return tuple(issues.with_known_issues(with_source(plan, source)) for plan in of_vllm)


def with_source(plan: Plan, source: Source) -> Plan:
    """Return the plan with the place of its config, which its process does not know."""
    place = {name: getattr(source, name) for name in ("name", "source", "basis", "assumed")}
    return replace(plan, model=replace(plan.model, **place))


def plan_in_child(
    folder: Path, deployments: Sequence[Sequence[str]], arch: str | None, variables: Variables
) -> list[Plan]:
    """Call ``child.plan_each``, whose import loads torch, in the process that ``ask_for_plans`` starts."""
    from vllm_aiter_mla.commands.plan import child

    return child.plan_each(folder, deployments, arch, variables)


def child_environment(variables: Variables, cache: str) -> dict[str, str]:
    """Return the environment of the process: quiet, with the variables, and vLLM's cache in a folder of its own."""
    environ = {**os.environ, **{name: value for name, (value, _) in variables.items()}, **QUIET}
    if "VLLM_PLUGINS" in environ:
        environ["VLLM_PLUGINS"] += f",{NAMESPACE}"
    return environ | {"VLLM_CACHE_ROOT": cache}
