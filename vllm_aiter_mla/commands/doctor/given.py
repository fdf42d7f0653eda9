"""What the checks look at besides the machine: the environment, and the options of ``vllm serve`` that were given."""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm_aiter_mla.compat import offline
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
    parser.error = offline.refuse  # type: ignore[method-assign]
    for names in CONFIGS:
        parser.add_argument(*names, "--" + names[0][2:].replace("-", "_"), type=_json_object, default={})
    try:
        dotted, others = _dotted(arguments)
        own, rest = parser.parse_known_args(others)
        compilation, additional = (
            dotted.get(names[0]) or getattr(own, names[0][2:].replace("-", "_")) for names in CONFIGS
        )
        passes = compilation.get("pass_config", {})
        _refuse_near_names(passes)
    except ValueError as error:
        return Given(wrong=str(error))
    config = SimpleNamespace(pass_config=SimpleNamespace(**passes))
    unread = f"{why}; not read: {' '.join(rest)}" if rest else why
    return Given(served=SimpleNamespace(compilation_config=config, additional_config=additional), unread=unread)


def _dotted(arguments: Sequence[str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Values given as ``-cc.a.b=v`` or ``-cc.a.b v``, nested, by the config's long name; and the other arguments."""
    found: dict[str, dict[str, Any]] = {}
    others, left = [], iter(arguments)
    for argument in left:
        head, equals, value = argument.partition("=")
        option, _, path = head.partition(".")
        names = next((names for names in CONFIGS if option.replace("_", "-") in names), None)
        if names is None or not path:
            others.append(argument)
            continue
        place: Any = found.setdefault(names[0], {})
        *parents, key = path.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ValueError(f"{head}: {parent} was given a value before")
        text = value if equals else next(left, None)
        if text is None:
            raise ValueError(f"{argument}: a value expected")
        # A list is given by `+=`; none of the plugin's own options is one.
        place[key.removesuffix("+")] = _json_or_text(text)
    return found, others


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text}: a JSON object expected")
    return value


def _refuse_near_names(passes: object) -> None:
    if not isinstance(passes, dict):
        raise ValueError(f"pass_config={passes!r}: an object expected")
    for name, value in passes.items():
        close = difflib.get_close_matches(name, PASS_CONFIG_FIELDS, n=1, cutoff=NEAR)
        if close and name not in PASS_CONFIG_FIELDS:
            raise ValueError(f"pass_config.{name}={value!r}: did you mean {close[0]!r}?")
