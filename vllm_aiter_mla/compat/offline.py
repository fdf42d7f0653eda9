"""What the commands ask vLLM without an engine: its options, its switches in the environment, its classes."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.settings import FLAG_FIELD, NAMESPACE, Settings

# Where `vllm serve` has its parser: since 0.33, in 0.32, before.
SERVE_PARSERS = (
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",
)

USE_AITER, USE_AITER_MLA = "VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MLA"
FP8_BMM, FP4_BMM = "VLLM_ROCM_USE_AITER_FP8BMM", "VLLM_ROCM_USE_AITER_FP4BMM"
BREAKABLE_GRAPHS, BATCH_INVARIANT = "VLLM_USE_BREAKABLE_CUDAGRAPH", "VLLM_BATCH_INVARIANT"
NO_MLA = "VLLM_MLA_DISABLE"
VARIABLES = (USE_AITER, USE_AITER_MLA, FP8_BMM, FP4_BMM, BREAKABLE_GRAPHS, BATCH_INVARIANT, NO_MLA)
"""What decides whether layers engage, and in which format vLLM holds their weights."""


class OptionError(ValueError):
    """An option is wrong; the message names it and its value."""


def refuse(message: str) -> NoReturn:
    """Raise OptionError, where argparse would print and exit."""
    raise OptionError(message)


def serve_options(arguments: Sequence[str]) -> Any:
    """Return the options of ``vllm serve``, read by vLLM's own parser: a namespace with vLLM's own config objects.

    The plugin must be registered before, or its own options are unknown.

    Raises:
        ImportError: vLLM is not importable.
        OptionError: an option is wrong; vLLM's sentence, with the closest name where a name is not known.
    """
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    _reject_two_spellings(arguments)
    parser = _serve_parser(FlexibleArgumentParser())
    parser.error = refuse
    for action in parser._actions:
        if action.dest == "compilation_config":
            action.type = partial(_compilation_config, action.type)
    try:
        parsed = parser.parse_args(list(arguments))
    except OptionError:
        raise
    except Exception as error:
        raise OptionError(f"vLLM's parser of options: {type(error).__name__}: {error}") from error
    return parsed


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
    from vllm.engine.arg_utils import AsyncEngineArgs

    parsed = serve_options([str(folder), *arguments])
    settings, backend = compat_config.settings_of(parsed), backend_name(parsed)
    setattr(parsed.compilation_config.pass_config, FLAG_FIELD, True)
    # Strict mode would end the plan at the first reason.
    own = dict((parsed.additional_config or {}).get(NAMESPACE, {})) | {"enabled": True, "strict": False}
    parsed.additional_config = {**(parsed.additional_config or {}), NAMESPACE: own}
    parsed.model, parsed.skip_tokenizer_init, parsed.tokenizer = str(folder), True, None
    args = AsyncEngineArgs.from_cli_args(parsed)
    notes = _without_its_own_code(args, folder)
    for key in difflib.get_close_matches(NAMESPACE, set(parsed.additional_config) - {NAMESPACE}, n=1, cutoff=0.8):
        notes.append(f"additional_config.{key} is not read by this plugin, whose key is {NAMESPACE}")
    return args, Given(settings, parsed.max_num_seqs, parsed.max_num_batched_tokens, backend, notes)


def _without_its_own_code(args: Any, folder: Path) -> list[str]:
    """Read a config whose class is Python code of a checkpoint that is not here by its fields, and say so."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig
    from vllm.transformers_utils import config as configs
    from vllm.transformers_utils.config_parser_base import ConfigParserBase

    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    place = str((fields.get("auto_map") or {}).get("AutoConfig", "")).partition(".")[0]
    if args.trust_remote_code and place and (folder / f"{place}.py").is_file():
        return []
    kind, args.trust_remote_code = fields.get("model_type"), False
    if kind in configs._CONFIG_REGISTRY or kind in CONFIG_MAPPING or args.config_format != "auto":
        return []

    class AsItStands(ConfigParserBase):
        def parse(self, model: Any, *_: Any, **__: Any) -> tuple[dict[str, Any], Any]:
            return dict(fields), PreTrainedConfig.from_dict(dict(fields))

    configs.register_config_parser("aiter_mla_as_it_stands")(AsItStands)
    args.config_format = "aiter_mla_as_it_stands"
    return [f"neither vLLM nor transformers has a config class for {kind!r}: its fields were read as they stand"]


def switched_on(name: str, env: Mapping[str, str] = {}) -> bool | None:
    """Return whether vLLM takes the switch ``name`` as on in an environment; None if vLLM cannot be asked.

    Raises:
        ValueError: vLLM cannot read the value, and would not start; names both.
    """
    try:
        from vllm import envs

        read = envs.environment_variables[name]
    except Exception:  # vLLM is missing, breaks while it is imported, or does not know the variable
        return None
    with mock.patch.dict(os.environ):  # the reader takes no argument: the process's environment is its input
        os.environ.pop(name, None)
        os.environ.update({name: env[name]} if name in env else {})
        try:
            return bool(read())
        except ValueError as error:
            raise ValueError(f"{name}={env.get(name, '')}: {error}") from error


def backend_name(parsed: Any) -> str:
    """Return the attention backend that the options name, in either spelling; "" where vLLM chooses."""
    config = getattr(parsed, "attention_config", None)
    chosen = getattr(parsed, "attention_backend", None) or getattr(config, "backend", None)
    return str(getattr(chosen, "name", chosen) or "")


def _serve_parser(parser: Any) -> Any:
    for name in SERVE_PARSERS:
        try:
            module = import_module(name)
        except ModuleNotFoundError:
            continue
        return module.make_arg_parser(parser)
    from vllm.engine.arg_utils import AsyncEngineArgs

    parser.add_argument("model_tag", nargs="?")
    return AsyncEngineArgs.add_cli_args(parser)


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
    from vllm.config import CompilationConfig, PassConfig

    path = tuple(map(str, found["loc"]))
    text = f"{'.'.join(path)}{'=' * bool(path)}{found['input']!r}: {found['msg']}"
    if found["type"] != "unexpected_keyword_argument" or len(path) > 2:
        return text
    known = [field.name for field in dataclasses.fields(CompilationConfig if len(path) == 1 else PassConfig)]
    close = difflib.get_close_matches(path[-1], known, n=1)
    return f"{text}; did you mean {close[0]!r}?" if close else text
