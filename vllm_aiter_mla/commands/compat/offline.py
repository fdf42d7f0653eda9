# SPDX-License-Identifier: Apache-2.0
"""What the commands ask vLLM without an engine: its options, its switches in the environment, its classes."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

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


def serve_parser() -> Any:
    """Return the parser of ``vllm serve``, or that of the engine's options where there is no such parser."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    for name in SERVE_PARSERS:
        try:
            module = import_module(name)
        except ModuleNotFoundError:
            continue
        return module.make_arg_parser(parser)
    parser.add_argument("model_tag", nargs="?")
    return AsyncEngineArgs.add_cli_args(parser)


def option_names(in_pass_config: bool) -> list[str]:
    """Return the options of vLLM's ``PassConfig``, or else of its ``CompilationConfig``."""
    from vllm.config import CompilationConfig, PassConfig

    return [field.name for field in dataclasses.fields(PassConfig if in_pass_config else CompilationConfig)]


def engine_args(parsed: Any, folder: Path) -> tuple[Any, list[str]]:
    """Return vLLM's ``AsyncEngineArgs`` of parsed options, and how the config in ``folder`` is read if not as usual."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    args = AsyncEngineArgs.from_cli_args(parsed)
    return args, _without_its_own_code(args, folder)


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
