"""The two configs as ``vllm serve`` takes them: JSON, or one value at a time as ``-cc.pass_config.NAME=true``.

vLLM's own reading (``FlexibleArgumentParser``), without vLLM, which may be what is missing here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

COMPILATION, ADDITIONAL = "--compilation-config", "--additional-config"
# vLLM writes underscores for dashes in a name as well.
SPELLINGS = {"-cc": COMPILATION, "--compilation_config": COMPILATION, "--additional_config": ADDITIONAL}

Configs = tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]


def read(compilation: str | None, additional: str | None, more: Sequence[str] = ()) -> Configs:
    """The compilation config and the additional config as plain containers; None where one is not given.

    Args:
        compilation: ``--compilation-config`` as JSON, or None.
        additional: ``--additional-config`` likewise.
        more: what else stands on the command line: the dotted spellings, and nothing but those.

    Raises:
        ValueError: not JSON, not an option of doctor's, or two spellings of one option. It names option and value.
    """
    dotted = _dotted(more)
    return (
        _merged(COMPILATION, compilation, dotted.get(COMPILATION)),
        _merged(ADDITIONAL, additional, dotted.get(ADDITIONAL)),
    )


def _merged(option: str, text: str | None, dotted: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if text is None:
        return dotted
    if dotted is not None:
        # There the last one replaces the other, whatever it holds.
        raise ValueError(
            f"{option}: given as JSON and as {option}.NAME=VALUE; `vllm serve` would take one of them alone"
        )
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{option} {text}: not JSON: {error}; {_forms(option)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{option} {text}: a JSON object expected; {_forms(option)}")
    return value


def _dotted(more: Sequence[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for argument, head, text in _pairs(more):
        name, *keys = head.split(".")
        if not keys or not all(key.removesuffix("+") for key in keys):
            raise ValueError(f"{argument}: {_forms(SPELLINGS.get(name, name))}")
        _put(found.setdefault(SPELLINGS.get(name, name), {}), keys, text)
    return found


def _pairs(more: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(argument, name with its keys, value) of each; the value may be an argument of its own."""
    rest = iter(more)
    for argument in rest:
        head, equals, text = argument.partition("=")
        name = head.partition(".")[0]
        if SPELLINGS.get(name, name) not in (COMPILATION, ADDITIONAL):
            raise ValueError(f"{argument}: doctor takes {COMPILATION} (-cc), {ADDITIONAL} and --json alone")
        value = text if equals else next(rest, None)
        if value is None:
            raise ValueError(f"{argument}: a value is missing")
        yield argument, head, value


def _put(config: dict[str, Any], keys: Sequence[str], text: str) -> None:
    *path, last = keys
    for key in path:
        if not isinstance(config.get(key), dict):
            config[key] = {}
        config = config[key]
    if last.endswith("+"):
        earlier = config.get(last[:-1])
        config[last[:-1]] = [*(earlier if isinstance(earlier, list) else ()), *text.split(",")]
        return
    config[last] = _value(text)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _forms(option: str) -> str:
    short = "-cc" if option == COMPILATION else option
    return f"as for `vllm serve`: {option} '{{...}}' or {short}.NAME=VALUE"
