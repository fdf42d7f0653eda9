"""The process that plan asks, for many plans: each is made in a fork, because vLLM keeps much of a config.

``python -m tests.support.plan_child gfx950`` reads a request a line and answers with a pickle: the plan, or why there
is none, and ``decision``: limit and code of the gate's last decision, as ``gate.apply`` returned them. A request may
name a bug to plant.
"""

import json
import os
import pickle
import sys
import traceback
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from vllm_aiter_mla import gate
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.commands.compat import rocm_config, vllm_options
from vllm_aiter_mla.commands.plan import build, child, vllm_facts
from vllm_aiter_mla.commands.plan.record import Plan

decisions: list[Any] = []
apply, facts, finished = gate.apply, vllm_facts.engine_facts, rocm_config.create_engine_config
layers = rocm_config.build_mla_layers


def _unquantised(config: Any) -> Any:
    config.quant_config = None
    return config


def _with_limit(engine: vllm_facts.EngineFacts, limit: int) -> vllm_facts.EngineFacts:
    assert engine.gate is not None
    return replace(engine, gate=replace(engine.gate, limit=limit))


def _over_another_forward(args: Any) -> Any:
    from vllm_aiter_mla.compat import wrapper

    wrapper.KNOWN_FORWARDS = {cls: {} for cls in wrapper.KNOWN_FORWARDS}  # of this fork alone
    return finished(args)


def _of_another_rotation(config: Any) -> Any:
    from vllm_aiter_mla.serving import module

    with mock.patch.object(module, "KNOWN_ROPES", ()):
        return layers(config)


def _without_their_wrappers(config: Any) -> Any:
    return [(kind._replace(module_skip=None), count) for kind, count in _of_another_rotation(config)]


def _whose_class_needs_a_library(args: Any) -> Any:
    from vllm.model_executor.models import registry

    def load(model: Any) -> Any:
        raise ModuleNotFoundError("No module named 'a_library'", name="a_library")

    with mock.patch.object(registry._LazyRegisteredModel, "load_model_cls", load):
        return finished(args)


BUGS = {
    "the model's class needs a library": (rocm_config, "create_engine_config", _whose_class_needs_a_library),
    "nothing is quantised": (rocm_config, "create_engine_config", lambda args: _unquantised(finished(args))),
    "the limit is not the gate's": (vllm_facts, "engine_facts", lambda *given: _with_limit(facts(*given), 1)),
    "vLLM has another forward": (rocm_config, "create_engine_config", _over_another_forward),
    "vLLM has another rotary embedding": (rocm_config, "build_mla_layers", _of_another_rotation),
    "plan asks no wrapper": (rocm_config, "build_mla_layers", _without_their_wrappers),
}


def applied(config: Any) -> Any:
    """Note what the gate decides; it leaves an engaged config alone."""
    found = apply(config)
    decisions.extend([found] * (found is not None))
    return found


def planned(request: dict[str, Any], vllm: vllm_facts.LoadedVllm) -> tuple[Plan, dict[str, Any]]:
    """Return the plan with the gate's decision."""
    bug = BUGS.get(request.pop("bug"))
    with mock.patch.object(*bug) if bug else nullcontext():
        variables = {name: (value, origin) for name, (value, origin) in request["variables"].items()}
        vllm = with_variables(vllm, {name: value for name, (value, _) in variables.items()})
        made = vllm_facts.collect_facts(Path(request["folder"]), request["arguments"])
        found = build.make_plan(made, vllm, variables)
    last = decisions[-1] if decisions else None
    skip = last.code if isinstance(last, Skip) else None
    return found, {"limit": getattr(last, "limit", None), "skip": skip}


def with_variables(vllm: vllm_facts.LoadedVllm, variables: dict[str, str]) -> vllm_facts.LoadedVllm:
    """Set environment variables in this fork, and return what vLLM reads of them. It keeps AITER's only."""
    from vllm._aiter_ops import rocm_aiter_ops

    os.environ.update(variables)
    rocm_aiter_ops.refresh_env_variables()
    return replace(vllm, switches=vllm_options.switch_states())


def answered(request: dict[str, Any], vllm: vllm_facts.LoadedVllm) -> Any:
    """Return ``planned``, or the error that it raised."""
    try:
        return planned(request, vllm)
    except BaseException as error:  # without an answer the test would wait for ever
        traceback.print_exc()
        return child.picklable_error(error), {}


def main(arch: str) -> None:
    """Answer requests until stdin ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # vLLM logs to stdout
    gate.apply = applied
    vllm = vllm_facts.load_vllm(arch)
    child.preload()
    for line in sys.stdin:
        pickle.dump(child.call_in_fork(partial(answered, json.loads(line), vllm)), out)
        out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
