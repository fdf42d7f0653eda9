# SPDX-License-Identifier: Apache-2.0
"""What the commands ask vLLM without an engine: its options, its switches in the environment, its classes."""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from vllm_aiter_mla.compat import release

# Where `vllm serve` has its parser: since 0.33, in 0.32, before.
SERVE_PARSERS = (
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",
)

# Options that vLLM answers by the model's tokenizer. Ours load none, because a config may come alone.
TOKENIZER_OPTIONS = ("tokenizer", "reasoning_parser", "reasoning_parser_plugin", "reasoning_config")

USE_AITER, USE_AITER_MLA = "VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MLA"
FP8_BMM, FP4_BMM = "VLLM_ROCM_USE_AITER_FP8BMM", "VLLM_ROCM_USE_AITER_FP4BMM"
BREAKABLE_GRAPHS, BATCH_INVARIANT = "VLLM_USE_BREAKABLE_CUDAGRAPH", "VLLM_BATCH_INVARIANT"
NO_MLA, CUSTOM_AR = "VLLM_MLA_DISABLE", "VLLM_ROCM_USE_AITER_CUSTOM_AR"
VARIABLES = (USE_AITER, USE_AITER_MLA, FP8_BMM, FP4_BMM, BREAKABLE_GRAPHS, BATCH_INVARIANT, NO_MLA, CUSTOM_AR)
"""What decides whether layers engage, in which format vLLM holds their weights, and which all-reduce runs."""


def plugins(allowed: str) -> list[str]:
    """Return the names that ``VLLM_PLUGINS`` allows, as vLLM reads them: a blank is a part of a name."""
    return allowed.split(",")


def load_plugins() -> None:
    """Load vLLM's general plugins, this one among them; where vLLM is not installed there are none."""
    if not release.is_installed():
        return
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def serve_parser() -> Any:
    """Return the parser of ``vllm serve``, or that of the engine's options where there is no such parser."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    for name in (None, "store"):
        parser.register("action", name, _Store)
    for name in SERVE_PARSERS:
        try:
            module = import_module(name)
        except ModuleNotFoundError:
            continue
        return module.make_arg_parser(parser)
    parser.add_argument("model_tag", nargs="?")
    return AsyncEngineArgs.add_cli_args(parser)


class _Store(argparse.Action):
    """What argparse does by default; ``spelled`` remembers by which of its names the option was given."""

    spelled: tuple[str | None, ...] = ()

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        self.spelled += (option_string,)


def serve_options(arguments: Sequence[str]) -> Any:
    """Return the options of ``vllm serve``: a namespace with vLLM's own config objects.

    The plugin must be registered before, or its own options are unknown.

    Raises:
        ImportError: vLLM is not importable.
        ValueError: an option is wrong, in vLLM's words; or one config is given in two ways, or is no JSON object.
    """
    parser = serve_parser()
    parser.error = _refuse
    try:
        parsed = parser.parse_args(list(arguments))
    except LookupError as error:  # "-cc.mode" without a value
        _refuse(f"vLLM's parser of options: {type(error).__name__}: {error}")
    except SystemExit:  # its help was printed
        _refuse("the options of `vllm serve` are explained by `vllm serve --help=all`")
    for action in parser._actions:
        _check_config(action, getattr(parsed, action.dest, None), arguments)
    return parsed


def _check_config(action: argparse.Action, value: Any, arguments: Sequence[str]) -> None:
    """Raise ValueError if ``value`` is no object where a config is one, or if it was given in several ways.

    vLLM uses the last way only. Its parser makes JSON of a table in the file of --config, and one of all NAME=VALUE by
    the same spelling.
    """
    spelled = getattr(action, "spelled", ())
    if spelled and not isinstance(value, (dict, type(None))) and _reads_any_json(action):
        _refuse(f"{action.option_strings[0]} {json.dumps(value)}: a JSON object expected")
    if len(spelled) < 2 or not (isinstance(value, dict) or is_dataclass(value)):
        return
    dotted = {word.partition(".")[0].replace("_", "-") for word in arguments if "." in word.partition("=")[0]}
    # vLLM's parser appends what it makes of NAME=VALUE, so that is the last one of its spelling.
    ways = [f"{name}{'.NAME=VALUE' * (name in dotted and name not in spelled[number:])}"
            for number, name in enumerate(spelled, 1)]  # fmt: skip
    file = " (the file of --config counts too)" * ("--config" in arguments)
    _refuse(f"{action.option_strings[0]}: given as {' and as '.join(ways)}{file}; vLLM would use the last one only")


def _reads_any_json(action: Any) -> bool:
    """Return whether vLLM reads an option by ``json.loads`` alone, and means no list, which the default would be."""
    try:
        return action.type("[{}]") == [{}] and not isinstance(action.default, list)
    except Exception:
        return False


def reset(parsed: Any, is_reset: Callable[[str], bool]) -> list[str]:
    """Set options back to vLLM's default; return those that had another value, as typed.

    ``is_reset`` says of an option's name, as in "max_num_seqs", whether it is set back.
    """
    defaults = vars(serve_parser().parse_args([]))
    changed = [name for name, value in vars(parsed).items() if is_reset(name) and value != defaults.get(name)]
    for name in changed:
        setattr(parsed, name, defaults.get(name))
    return ["--" + name.replace("_", "-") for name in changed]


def _refuse(message: str) -> NoReturn:
    """Raise where argparse would print and exit; pydantic's findings take several lines."""
    raise ValueError(" ".join(message.split()))


def engine_args(parsed: Any, folder: Path) -> tuple[Any, list[str]]:
    """Return vLLM's ``AsyncEngineArgs`` of parsed options, and notes on how the config in ``folder`` is read.

    There is a note if vLLM would not read the config of a checkpoint so: if it comes as ``params.json``, or if its
    class is Python code of the checkpoint that is not here. Such a config is read by its fields.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    args, fields = AsyncEngineArgs.from_cli_args(parsed), config_of(folder)
    if not fields:
        if args.config_format != "auto":
            return args, []
        args.config_format = "mistral"  # vLLM takes it by the names of the checkpoint's files
        return args, ["params.json is read as by --config-format mistral"]
    python_file = str((fields.get("auto_map") or {}).get("AutoConfig", "")).partition(".")[0]
    if args.trust_remote_code and python_file and (folder / f"{python_file}.py").is_file():
        return args, []
    args.trust_remote_code = False
    kind = fields.get("model_type")
    if _has_config_class(kind) or args.config_format != "auto":
        return args, []
    args.config_format = _register_parser_of_fields(kind, fields)
    note = (
        f"neither vLLM nor transformers has a config class for {kind!r}: its fields were read as they stand; the "
        "checkpoint's own Python files, in the same folder, say more"
    )
    return args, [note]


def _has_config_class(kind: Any) -> bool:
    """Return whether vLLM or transformers has a class for the configs of this ``model_type``."""
    from transformers import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    return kind in _CONFIG_REGISTRY or kind in CONFIG_MAPPING


def _register_parser_of_fields(kind: Any, fields: dict[str, Any]) -> str:
    """Let vLLM read a config by its ``fields``; return the ``config_format`` for that."""
    from transformers import PreTrainedConfig
    from vllm.transformers_utils import config as configs
    from vllm.transformers_utils.config_parser_base import ConfigParserBase

    # transformers asks for numbers of the config, such as its positions, before it has set them.
    numbers = {
        name: value for name, value in fields.items()
        if isinstance(value, (int, float)) and not hasattr(PreTrainedConfig, name)
    }  # fmt: skip
    config_class: Any = type(PreTrainedConfig.__name__, (PreTrainedConfig,), numbers | {WITHOUT_CLASS: True})

    class ReadsFields(ConfigParserBase):
        def parse(self, model: Any, *_: Any, **__: Any) -> tuple[dict[str, Any], Any]:
            try:
                return dict(fields), config_class.from_dict(dict(fields))
            except Exception as error:
                raise ConfigClassError(kind, error) from error

    configs.register_config_parser("aiter_mla_as_it_stands")(ReadsFields)
    return "aiter_mla_as_it_stands"


WITHOUT_CLASS = "aiter_mla_without_class"
"""An attribute of configs that were read by their fields, because their class is not here."""


class ConfigClassError(RuntimeError):
    """The config of a checkpoint whose Python files are not here cannot be read by its fields: vLLM is not at fault."""

    def __init__(self, kind: Any, error: BaseException) -> None:
        problem = f"{type(error).__name__}: {error}"
        super().__init__(f"the config class of {kind!r} is not here, and its fields are not enough: {problem}")


def missing_field_error(error: BaseException) -> ConfigClassError | None:
    """Return the error to show if vLLM wants a field that a config without its class lacks; None for other errors."""
    config = getattr(error, "obj", None)
    if isinstance(error, AttributeError) and hasattr(type(config), WITHOUT_CLASS):
        return ConfigClassError(getattr(config, "model_type", ""), error)
    return None


def config_of(folder: Path) -> dict[str, Any]:
    """Return the fields of ``config.json``; none of a folder that has Mistral's ``params.json`` only."""
    path = folder / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def has_variable(name: str) -> bool:
    """Return whether this vLLM reads a variable of that name."""
    from vllm import envs

    return name in envs.environment_variables


def variables() -> list[str]:
    """Return the names of the variables that this vLLM reads."""
    from vllm import envs

    return list(envs.environment_variables)


def switches() -> dict[str, bool]:
    """Return ``VARIABLES`` as vLLM reads them in this process; one that this release does not have is off.

    Raises:
        ValueError: vLLM cannot read a value, and would not start; names both.
    """
    from vllm import envs

    states = {}
    for name in VARIABLES:
        try:
            states[name] = bool(envs.environment_variables.get(name, bool)())
        except ValueError as error:
            raise ValueError(f"{name}={os.environ[name]}: {error}") from error
    return states
