"""Plans by a few long-lived processes: each imports vLLM once, and answers in a fork of its own."""

import atexit
import functools
import json
import pickle
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import ConfigView, LayerView
from vllm_aiter_mla.commands.check.options import build_plan_environment
from vllm_aiter_mla.commands.compat import rocm_config, vllm_options
from vllm_aiter_mla.commands.plan import build, config_source, planner
from vllm_aiter_mla.commands.plan.record import Model, Plan, PlanOptions
from vllm_aiter_mla.commands.plan.vllm_facts import EngineFacts, LoadedVllm, UserOptions, VllmFacts
from vllm_aiter_mla.compat.config import GraphSizes
from vllm_aiter_mla.settings import Settings

ARCH = "gfx950"
ENV = ("VLLM_ROCM_USE_AITER_FP8BMM=1", "VLLM_ROCM_USE_AITER_FP4BMM=1")
"""What vLLM has by default up to 0.32, named: from 0.33 on both are off."""


class Worker:
    """The process for a card, and for the variables that vLLM reads while it is imported."""

    def __init__(self, arch: str, env: tuple[str, ...]) -> None:
        self._cache = tempfile.TemporaryDirectory()
        variables = planner.child_environment(build_plan_environment(env, {}), self._cache.name)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.plan_child", arch], stderr=subprocess.DEVNULL,
            # vLLM sets its logging up for each config, and nobody reads it.
            env=variables | {"VLLM_CONFIGURE_LOGGING": "0"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        atexit.register(self.close)

    def ask(
        self, source: config_source.ConfigSource, arguments: tuple[str, ...], env: tuple[str, ...], bug: str = ""
    ) -> tuple[Plan, dict[str, Any]]:
        """Return the plan, or raise why there is none, and what was asked of the gate: its ``decision``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with source.folder() as folder:
            variables = build_plan_environment(env, {})
            request = {"folder": str(folder), "arguments": arguments, "variables": variables, "bug": bug}
            self._process.stdin.write(f"{json.dumps(request)}\n".encode())
            self._process.stdin.flush()
            found, decision = pickle.load(self._process.stdout)
        if isinstance(found, Exception):
            raise found
        return planner.with_source(found, source), decision

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._cache.cleanup()


_worker = functools.cache(Worker)
READ_AGAIN = "VLLM_ROCM_USE_AITER"
"""Variables with this prefix are set in a fork: vLLM has a function that reads them again."""


def plan_of(
    arch: str, env: tuple[str, ...], source: config_source.ConfigSource, arguments: tuple[str, ...], bug: str = ""
) -> tuple[Plan, dict[str, Any]]:
    """Return the plan under ``NAME=VALUE`` variables and the gate's decision, or raise why there is none."""
    imported = {one.partition("=")[0]: one for one in env if not one.startswith(READ_AGAIN)}
    return _worker(arch, tuple(value for _, value in sorted(imported.items()))).ask(source, arguments, env, bug)


@functools.cache
def planned(name: str, *arguments: str, arch: str = ARCH, env: tuple[str, ...] = ENV, bug: str = "") -> dict[str, Any]:
    """The plan of the model ``name`` as the step ``plan`` has it in JSON."""
    plan, decision = plan_of(arch, env, config_source.find_config(name), arguments, bug)
    return {**json.loads(files.to_json(plan)), "decision": decision}


def ask(source: config_source.ConfigSource, asked: Any, arch: str, variables: Any, verbose: bool) -> tuple[Plan, ...]:
    """Replace ``planner.make_plans`` by the process of all tests, whatever the card and the variables."""
    return tuple(plan_of(ARCH, ENV, source, tuple(arguments))[0] for arguments in asked)


def parsed(plan: dict[str, Any]) -> Plan:
    """The record of a plan as JSON has it."""
    return files.parse_unstamped(Plan, Path("plan"), plan)


VLLM = LoadedVllm("gfx942", True, "0.32.0", dict.fromkeys(vllm_options.VARIABLES, True))
"""What ``vllm_facts.load_vllm`` may return."""


def simulated_facts(settings: Settings = Settings(), **changes: Any) -> VllmFacts:  # noqa: B008  frozen
    """Return facts about 61 layers where the gate declines; ``changes`` are fields of the engine's view."""
    view, facts = replace(ConfigView(), **changes), Model("DeepseekV3ForCausalLM", True, "bfloat16", 61, 4096, 61)
    options = PlanOptions(
        tp=8, pp=1, dp=1, max_num_seqs=256, max_num_batched_tokens=16384, block_size=16, num_drafts=0,
        kv_cache_dtype=view.kv_cache_dtype, dcp=view.dcp, pcp=view.pcp, enforce_eager=view.enforce_eager,
        mode=view.mode, dtype=facts.dtype, settings=settings,
    )  # fmt: skip
    sizes = [1, 2, 256, 512]
    engine = EngineFacts(None, view, options, ((1, 4681), (4682, 16384)), GraphSizes(sizes[:-1], sizes))
    kind = rocm_config.LayerKind(LayerView(model_dtype="bfloat16"), "fp8", "Fp8LinearMethod", "", True, False)
    return VllmFacts(UserOptions(settings, None, None, []), facts, engine, [(kind, 61)])


def made_up(*env: str, **changes: Any) -> Plan:
    """The plan of ``simulated_facts(**changes)`` under the variables ``env``."""
    return build.make_plan(simulated_facts(**changes), VLLM, build_plan_environment(env, {}))


def codes(plan: dict[str, Any]) -> list[str]:
    """Codes of the reasons, in order."""
    return [reason["code"] for reason in plan["reasons"]]
