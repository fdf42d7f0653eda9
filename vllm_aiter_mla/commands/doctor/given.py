"""What the checks look at besides the machine: the environment, and the options of ``vllm serve`` that were given."""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn

from vllm_aiter_mla.settings import PASS_CONFIG_FIELDS

CONFIGS = (("--compilation-config", "-cc"), ("--additional-config",))
# Without vLLM its own names are not known: only a name this near to one of ours is taken for a mistyped one.
NEAR = 0.9


@dataclass(frozen=True)
class Given:
    """Environment and options.

    Attributes:
        env: environment variables.
        served: vLLM's parsed options; without vLLM a stand-in with the plugin's own; None when none were given.
        wrong: the sentence about an option that is wrong; ``served`` is None then.
        unread: why vLLM's own options among them were not read; empty when they were.
    """

    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    served: Any = None
    wrong: str = ""
    unread: str = ""


def read(arguments: Sequence[str]) -> Given:
    """The options as vLLM's own parser reads them; where vLLM is missing, the plugin's own options as JSON."""
    if not arguments:
        return Given()
    from vllm_aiter_mla import plugin
    from vllm_aiter_mla.compat import offline

    plugin.register()
    try:
        _refuse_two_spellings(arguments)
        return Given(served=offline.serve_options(arguments))
    except ValueError as error:
        return Given(wrong=str(error))
    # A vLLM that is missing, or that breaks while it is imported, must not end the examination.
    except (Exception, SystemExit) as error:
        return _without_vllm(arguments, f"{type(error).__name__}: {error}")


def _refuse_two_spellings(arguments: Sequence[str]) -> None:
    """Raise ValueError where one config stands as JSON and as dotted values: vLLM lets the last replace the other."""
    heads = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    for names in CONFIGS:
        if set(names) & set(heads) and any(head.startswith(f"{name}.") for name in names for head in heads):
            raise ValueError(f"{names[0]}: given as JSON and as {names[0]}.NAME=VALUE; vLLM would use one of them only")


def _without_vllm(arguments: Sequence[str], why: str) -> Given:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = _refuse  # type: ignore[method-assign]
    for names in CONFIGS:
        parser.add_argument(*names, names[0].replace("n-c", "n_c"), type=_json_object, default={})
    try:
        own, rest = parser.parse_known_args(arguments)
        passes = own.compilation_config.get("pass_config", {})
        _refuse_near_names(passes)
    except ValueError as error:
        return Given(wrong=str(error))
    config = SimpleNamespace(pass_config=SimpleNamespace(**passes))
    unread = f"{why}; not read: {' '.join(rest)} (give configs as JSON)" if rest else why
    return Given(
        served=SimpleNamespace(compilation_config=config, additional_config=own.additional_config), unread=unread
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text}: a JSON object expected")
    return value


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _refuse_near_names(passes: object) -> None:
    if not isinstance(passes, dict):
        raise ValueError(f"pass_config={passes!r}: an object expected")
    for name, value in passes.items():
        close = difflib.get_close_matches(name, PASS_CONFIG_FIELDS, n=1, cutoff=NEAR)
        if close and name not in PASS_CONFIG_FIELDS:
            raise ValueError(f"pass_config.{name}={value!r}: did you mean {close[0]!r}?")
