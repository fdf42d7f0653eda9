# SPDX-License-Identifier: Apache-2.0
"""The options of ``vllm serve`` that a plan is given, read by vLLM's own parser."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from vllm_aiter_mla.commands.compat import offline
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.settings import FLAG_FIELD, NAMESPACE, Settings


class OptionError(ValueError):
    """An option is wrong; the message names it and its value."""


def refuse(message: str) -> NoReturn:
    """Raise OptionError, where argparse would print and exit."""
    raise OptionError(message)


def serve_options(arguments: Sequence[str]) -> Any:
    """Return the options of ``vllm serve``: a namespace with vLLM's own config objects.

    The plugin must be registered before, or its own options are unknown.

    Raises:
        ImportError: vLLM is not importable.
        OptionError: an option is wrong; vLLM's sentence, with the closest name where a name is not known.
    """
    _reject_two_spellings(arguments)
    parser = offline.serve_parser()
    parser.error = refuse
    for action in parser._actions:
        if action.dest == "compilation_config":
            action.type = partial(_compilation_config, action.type)
    try:
        return parser.parse_args(list(arguments))
    except OptionError:
        raise
    except Exception as error:
        raise OptionError(f"vLLM's parser of options: {type(error).__name__}: {error}") from error


def _reject_two_spellings(arguments: Sequence[str]) -> None:
    """Raise OptionError if one config is given as JSON and as dotted values: vLLM would drop the first."""
    heads = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    for names in (("--compilation-config", "-cc"), ("--additional-config",)):
        if set(names) & set(heads) and any(head.startswith(f"{name}.") for name in names for head in heads):
            refuse(f"{names[0]}: given as JSON and as {names[0]}.NAME=VALUE; vLLM would use one of them only")


@dataclass(frozen=True)
class Given:
    """What was asked for, None where vLLM's default counts; ``notes`` say how the model's config was read."""

    settings: Settings
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    attention_backend: str
    notes: list[str]


def engine_args(folder: Path, arguments: Sequence[str]) -> tuple[Any, Given]:
    """Return vLLM's ``AsyncEngineArgs`` with the plugin switched on, for a config without a tokenizer.

    Raises:
        OptionError: as :func:`serve_options`.
    """
    parsed = serve_options([str(folder), *arguments])
    settings, backend = compat_config.settings_of(parsed), backend_name(parsed)
    setattr(parsed.compilation_config.pass_config, FLAG_FIELD, True)
    # Strict mode would end the plan at the first reason.
    own = dict((parsed.additional_config or {}).get(NAMESPACE, {})) | {"enabled": True, "strict": False}
    parsed.additional_config = {**(parsed.additional_config or {}), NAMESPACE: own}
    parsed.model, parsed.skip_tokenizer_init, parsed.tokenizer = str(folder), True, None
    args, notes = offline.engine_args(parsed, folder)
    for key in difflib.get_close_matches(NAMESPACE, set(parsed.additional_config) - {NAMESPACE}, n=1, cutoff=0.8):
        notes.append(f"additional_config.{key} is not read by this plugin, whose key is {NAMESPACE}")
    return args, Given(settings, parsed.max_num_seqs, parsed.max_num_batched_tokens, backend, notes)


def backend_name(parsed: Any) -> str:
    """Return the attention backend that the options name, in either spelling; "" where vLLM chooses."""
    config = getattr(parsed, "attention_config", None)
    chosen = getattr(parsed, "attention_backend", None) or getattr(config, "backend", None)
    return str(getattr(chosen, "name", chosen) or "")


def _compilation_config(read: Callable[[str], Any], text: str) -> Any:
    """Read a compilation config by vLLM's ``read``. An error is one line."""
    try:
        return read(text)
    except argparse.ArgumentTypeError as error:
        findings = getattr(error.__cause__, "errors", None)
        if findings is None:
            raise
        raise argparse.ArgumentTypeError("; ".join(map(_finding, findings()))) from error


def _finding(found: Any) -> str:
    """Format one of pydantic's findings: ``pass_config.fuse_norm_qant=True: ...; did you mean 'fuse_norm_quant'?``."""
    path = tuple(map(str, found["loc"]))
    text = f"{'.'.join(path)}{'=' * bool(path)}{found['input']!r}: {found['msg']}"
    if found["type"] != "unexpected_keyword_argument" or len(path) > 2:
        return text
    close = difflib.get_close_matches(path[-1], offline.option_names(in_pass_config=len(path) == 2), n=1)
    return f"{text}; did you mean {close[0]!r}?" if close else text
