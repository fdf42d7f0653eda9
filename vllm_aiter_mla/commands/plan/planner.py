# SPDX-License-Identifier: Apache-2.0
"""Make the plans of a model with vLLM, in a separate process."""

import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.compat import vllm_options
from vllm_aiter_mla.commands.plan import issues
from vllm_aiter_mla.commands.plan.config_source import ConfigSource
from vllm_aiter_mla.commands.plan.record import FORWARDED_ERRORS, Plan, PlanEnvironment, server_environment

# The child makes no connection and leaves no file.
CHILD_VARIABLES = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                   "PYTHONSAFEPATH": "1"}  # fmt: skip


def make_plans(
    source: ConfigSource,
    deployments: Sequence[Sequence[str]],
    arch: str | None,
    plan_environment: PlanEnvironment,
    is_verbose: bool,
) -> tuple[Plan, ...]:
    """Return a plan of ``source`` for each deployment, which is a list of options of ``vllm serve``.

    ``arch`` is the architecture to plan for. None stands for that of this machine.

    Raises:
        ModuleNotFoundError: torch or vLLM is not installed.
        ValueError: the source is not a config, vLLM rejects the model or an option, or a server with this environment
            does not load the plugin.
        NotKnownError: vLLM fails on this machine, with no wrong option.
        RuntimeError: vLLM ended, or raised something else.
    """
    if (reason := vllm_options.unloaded_plugin_reason(server_environment(plan_environment))) is not None:
        raise ValueError(f"{reason}; {vllm_options.PLUGIN_REMEDY}")
    for package in ("torch", "vllm"):
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    with process.workspace(), source.folder() as folder, tempfile.TemporaryDirectory() as cache_folder:
        try:
            plans = process.call(
                make_plans_in_child, folder, deployments, arch, plan_environment,
                environment=child_environment(plan_environment, cache_folder),
                log_descriptor=process.STDERR_DESCRIPTOR if is_verbose else subprocess.DEVNULL,
                expected_errors=FORWARDED_ERRORS,
            )  # fmt: skip
        except process.EndedError as error:
            raise RuntimeError(f"vLLM {error.ending}; --verbose shows its log") from error
    return tuple(issues.with_known_issues(with_source(plan, source)) for plan in plans)


def with_source(plan: Plan, source: ConfigSource) -> Plan:
    """Return the plan with the origin of its config. The child does not know it."""
    model = replace(
        plan.model, name=source.name, source=source.config_location, basis=source.basis, assumed=source.assumed
    )
    return replace(plan, model=model)


def make_plans_in_child(
    folder: Path, deployments: Sequence[Sequence[str]], arch: str | None, plan_environment: PlanEnvironment
) -> list[Plan]:
    """Call ``child.plan_deployments`` in the process that ``make_plans`` starts. Only there is torch imported."""
    from vllm_aiter_mla.commands.plan import child

    return child.plan_deployments(folder, deployments, arch, plan_environment)


def child_environment(plan_environment: PlanEnvironment, cache_folder: str) -> dict[str, str]:
    """Return the child's environment, with the plan's variables, and ``cache_folder`` as the folder of vLLM's cache."""
    return {**server_environment(plan_environment), **CHILD_VARIABLES, "VLLM_CACHE_ROOT": cache_folder}
