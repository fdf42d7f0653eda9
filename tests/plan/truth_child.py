"""The process that plan asks, with two things more: what the engine's own gate decided, and planted bugs.

``python -m tests.plan.truth_child gfx950`` is ``compat.rocm_config``. Each answer gets ``decision``: limit and code of
the gate's last answer, as ``gate.apply`` returned them.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext, suppress
from importlib import import_module
from typing import Any
from unittest import mock

from vllm_aiter_mla import gate
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import rocm_config

decisions: list[Any] = []
apply, answer, inspect = gate.apply, rocm_config.answer, rocm_config.inspect_in_process
facts = rocm_config.engine_facts
BUGS = {
    "nothing is quantised": ("_method_of_kv_b_proj", lambda quant: lambda layer, prefix: None),
    "the limit is not the gate's": ("engine_facts", lambda config: facts(config) | {"gate": None}),
}


# Imported once for all answers, which are given in forks.
WARM = (
    "vllm.model_executor.models.deepseek_v2", "vllm_aiter_mla.passes.pipeline",
    "vllm.v1.attention.backends.mla.rocm_aiter_mla", compat_config.FUSED_MODULE,
)  # fmt: skip


def warm() -> None:
    """Let models be looked at in this process, with what most of them need imported."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    inspect()
    for name in WARM:
        import_module(name)
    for name in QUANTIZATION_METHODS:
        with suppress(Exception):
            get_quantization_config(name)


def applied(config: Any) -> Any:
    """Note what the gate answers."""
    decisions.append(apply(config))
    return decisions[-1]


def answered(request: dict[str, Any]) -> dict[str, Any]:
    """Add the gate's decision; the environment names a bug to plant."""
    bug = BUGS.get(os.environ.get("PLANTED_BUG", ""))
    with mock.patch.object(rocm_config, *bug) if bug else nullcontext():
        found = answer(request)
    last = decisions[-1] if decisions else None
    limit, skip = (None, last.code) if isinstance(last, Skip) else (last, None)
    return found | {"decision": {"limit": limit, "skip": skip}}


if __name__ == "__main__":
    gate.apply, rocm_config.answer, rocm_config.inspect_in_process = applied, answered, warm
    rocm_config.main(*sys.argv[1:])
