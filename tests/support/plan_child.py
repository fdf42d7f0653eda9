"""The process that plan asks, for many plans: each is made in a fork, because vLLM keeps much of a config.

``python -m tests.support.plan_child gfx950`` reads a request a line and answers with a pickle: the plan, or why there
is none, and ``decision``: limit and code of the gate's last decision, as ``gate.apply`` returned them. A request may
name a bug to plant.
"""

import gc
import json
import os
import pickle
import sys
import traceback
from contextlib import nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from vllm_aiter_mla import gate
from vllm_aiter_mla.admission import LayerView, Skip
from vllm_aiter_mla.commands.compat import offline, rocm_config
from vllm_aiter_mla.commands.plan import answer, build, kernels
from vllm_aiter_mla.commands.plan.record import Plan
from vllm_aiter_mla.compat import release
from vllm_aiter_mla.settings import Settings

decisions: list[Any] = []
apply, facts, finished = gate.apply, answer.engine_facts, rocm_config.finished_config
layers = rocm_config.mla_layers


def _unquantised(config: Any) -> Any:
    config.quant_config = None
    return config


def _with_limit(engine: dict[str, Any], limit: int) -> dict[str, Any]:
    return engine | {"gate": engine["gate"] | {"limit": limit}}


def _over_another_forward(args: Any) -> Any:
    from vllm_aiter_mla.compat import wrapper

    wrapper.KNOWN_FORWARDS = {cls: {} for cls in wrapper.KNOWN_FORWARDS}  # of this fork alone
    return finished(args)


def _of_another_rotation(config: Any) -> Any:
    from vllm_aiter_mla.serving import module

    with mock.patch.object(module, "KNOWN_ROPES", ()):
        return layers(config)


def _without_their_wrappers(config: Any) -> Any:
    return [(kind._replace(why_not_module=None), count) for kind, count in _of_another_rotation(config)]


BUGS = {
    "nothing is quantised": (rocm_config, "finished_config", lambda args: _unquantised(finished(args))),
    "the limit is not the gate's": (answer, "engine_facts", lambda config: _with_limit(facts(config), 1)),
    "vLLM has another forward": (rocm_config, "finished_config", _over_another_forward),
    "vLLM has another rotary embedding": (rocm_config, "mla_layers", _of_another_rotation),
    "plan asks no wrapper": (rocm_config, "mla_layers", _without_their_wrappers),
}
# Imported once for all plans, which would else each import them.
WARM = (
    "vllm.model_executor.models.deepseek_v2", "vllm_aiter_mla.passes.pipeline",
    "vllm.v1.attention.backends.mla.rocm_aiter_mla", release.FUSED_MODULE, "ray",
)  # fmt: skip


def warm() -> None:
    """Import what most models need."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    offline.serve_options([])
    for name in WARM:
        with suppress(ImportError):
            import_module(name)
    for name in QUANTIZATION_METHODS:
        with suppress(Exception):
            get_quantization_config(name)
    kernels.planned("gfx950", Settings(), LayerView(model_dtype="bfloat16"), "plain", 16, 1024)
    gc.freeze()  # a fork then neither copies nor looks through what is imported


def applied(config: Any) -> Any:
    """Note what the gate decides; it leaves an engaged config alone."""
    found = apply(config)
    decisions.extend([found] * (found is not None))
    return found


def planned(request: dict[str, Any], about: dict[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """Return the plan with the gate's decision."""
    bug = BUGS.get(request.pop("bug"))
    with mock.patch.object(*bug) if bug else nullcontext():
        made = answer.answer(Path(request["folder"]), request["arguments"])
        variables = {name: (value, origin) for name, (value, origin) in request["variables"].items()}
        found = build.build(made, about, variables)
    last = decisions[-1] if decisions else None
    skip = last.code if isinstance(last, Skip) else None
    return found, {"limit": getattr(last, "limit", None), "skip": skip}


def main(arch: str) -> None:
    """Answer requests until stdin ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # vLLM logs to stdout
    gate.apply = applied
    about = answer.start(arch)
    warm()
    for line in sys.stdin:
        if os.fork() == 0:
            found: Any
            try:
                found = planned(json.loads(line), about)
            except BaseException as error:  # without an answer the test would wait for ever
                traceback.print_exc()
                found = build.failure(error), {}
            pickle.dump(found, out)
            out.flush()
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
