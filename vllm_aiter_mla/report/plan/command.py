"""From the command line to a printed plan and an exit status."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from vllm_aiter_mla import evidence
from vllm_aiter_mla.report.plan import build, model, options, page, vllm_rules
from vllm_aiter_mla.settings import SettingsError

ENGAGES, DOES_NOT, WRONG = 0, 1, 2


def main(name: str, arguments: Sequence[str], arch: str, env: Sequence[str], *, as_json: bool = False) -> int:
    """Plan ``name`` with the options of ``vllm serve`` in ``arguments``.

    Returns:
        0 when the layers would engage, 1 when not, 2 when the model or an option is wrong. A wrong option of vLLM's
        ends in vLLM's own message and ``SystemExit``, status 2 as well.
    """
    # vLLM logs to stdout, where the plan goes.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        _check_model_comes_first(name, arguments)
        facts = model.load(name)
        environment = options.environment(env)
        parsed = vllm_rules.parse(name, arguments)
        plan = build.build(options.read(parsed, facts, arch, environment), facts)
    except (model.ModelNotFoundError, SettingsError, ValueError, vllm_rules.VllmMissingError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return WRONG
    print(json.dumps(plan | evidence.stamp("plan", 1), indent=1) if as_json else page.text(plan))
    return ENGAGES if plan["verdict"] == build.ENGAGED else DOES_NOT


def _check_model_comes_first(name: str, arguments: Sequence[str]) -> None:
    """Raise ValueError where MODEL is an option, as it is when options come first, or where a second one is named."""
    if name.startswith("-"):
        raise ValueError(f"{name} in the place of MODEL: MODEL comes first, then the options of `vllm serve`")
    for index, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option == "--model":
            other = value if equals else next(iter(arguments[index + 1 : index + 2]), "")
            raise ValueError(f"--model {other} beside MODEL {name}: give the model once, as MODEL")
