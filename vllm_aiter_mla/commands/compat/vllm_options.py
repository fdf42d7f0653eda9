# SPDX-License-Identifier: Apache-2.0
"""vLLM's options, environment variables and config classes, for commands without an engine."""

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from vllm_aiter_mla.compat import release
from vllm_aiter_mla.settings import NAMESPACE

PLUGIN_REMEDY = f"add {NAMESPACE} to VLLM_PLUGINS, names separated by commas without blanks, or unset it"
# Modules with the parser of `vllm serve`: from 0.33 on, in 0.32, and before.
SERVE_PARSERS = (
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",
)

# Options for which vLLM loads the model's tokenizer. The commands load none, because a config may come without it.
TOKENIZER_OPTIONS = ("tokenizer", "reasoning_parser", "reasoning_parser_plugin", "reasoning_config")

USE_AITER, USE_AITER_MLA = "VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MLA"
FP8_BMM, FP4_BMM = "VLLM_ROCM_USE_AITER_FP8BMM", "VLLM_ROCM_USE_AITER_FP4BMM"
BREAKABLE_GRAPHS, BATCH_INVARIANT = "VLLM_USE_BREAKABLE_CUDAGRAPH", "VLLM_BATCH_INVARIANT"
NO_MLA, CUSTOM_AR = "VLLM_MLA_DISABLE", "VLLM_ROCM_USE_AITER_CUSTOM_AR"
VARIABLES = (USE_AITER, USE_AITER_MLA, FP8_BMM, FP4_BMM, BREAKABLE_GRAPHS, BATCH_INVARIANT, NO_MLA, CUSTOM_AR)
"""Variables that decide whether layers engage, which format their weights have, and which all-reduce runs."""


def allowed_plugins(vllm_plugins: str) -> list[str]:
    """Return the plugins that ``VLLM_PLUGINS`` allows, as vLLM reads it. A blank is a part of a name."""
    return vllm_plugins.split(",")


def unloaded_plugin_reason(environment: Mapping[str, str]) -> str | None:
    """Return why a server in this environment does not load the plugin, or None. ``VLLM_PLUGINS`` is an allow-list."""
    vllm_plugins = environment.get("VLLM_PLUGINS")
    if vllm_plugins is None or NAMESPACE in allowed_plugins(vllm_plugins):
        return None
    return f"VLLM_PLUGINS={vllm_plugins!r} leaves {NAMESPACE} out: the flag will be unknown"


def load_plugins() -> None:
    """Load vLLM's general plugins, including this one. Without vLLM do nothing."""
    if not release.is_installed():
        return
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def serve_parser() -> Any:
    """Return the parser of ``vllm serve``, or, if vLLM has none, that of the engine's options."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    for name in (None, "store"):
        parser.register("action", name, _StoreWithSpelling)
    for name in SERVE_PARSERS:
        try:
            module = import_module(name)
        except ModuleNotFoundError:
            continue
        return module.make_arg_parser(parser)
    parser.add_argument("model_tag", nargs="?")
    return AsyncEngineArgs.add_cli_args(parser)


class _StoreWithSpelling(argparse.Action):
    """The default action of argparse, which also keeps the name by which an option was given, in ``spellings``."""

    spellings: tuple[str | None, ...] = ()

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        self.spellings += (option_string,)


def parse_serve_options(arguments: Sequence[str]) -> Any:
    """Parse the options of ``vllm serve``, and return a namespace with vLLM's own config objects.

    Register the plugin first, so that vLLM knows its options.

    Raises:
        ImportError: vLLM is not importable.
        ValueError: vLLM rejects an option; or a config is given in two ways, or is not a JSON object.
    """
    for word in arguments:
        if word.startswith("--config="):
            _raise_value_error(f"{word}: vLLM reads no file that is given so; write --config {word.partition('=')[2]}")
    parser = serve_parser()
    parser.error = _raise_value_error
    try:
        parsed = parser.parse_args(list(arguments))
    except LookupError as error:  # "-cc.mode" without a value
        _raise_value_error(f"vLLM's parser of options: {type(error).__name__}: {error}")
    except AttributeError as error:  # it takes any file to hold NAME: VALUE
        if "--config" not in arguments:
            raise
        path = arguments[list(arguments).index("--config") + 1]
        _raise_value_error(f"--config {path}: vLLM finds no options there: {error}")
    except SystemExit:  # its help was printed
        _raise_value_error("the options of `vllm serve` are explained by `vllm serve --help=all`")
    for action in parser._actions:
        _check_config_option(action, getattr(parsed, action.dest, None), arguments)
    return parsed


def _check_config_option(action: argparse.Action, value: Any, arguments: Sequence[str]) -> None:
    """Raise ValueError if the value of a config is not an object, or if a config was given in several ways.

    vLLM would use only the last of them. Its parser turns a table in the file of --config into JSON, and also all
    NAME=VALUE under one spelling.
    """
    spellings = getattr(action, "spellings", ())
    if spellings and not isinstance(value, (dict, type(None))) and _reads_any_json(action):
        _raise_value_error(f"{action.option_strings[0]} {json.dumps(value)}: a JSON object expected")
    if len(spellings) < 2 or not (isinstance(value, dict) or is_dataclass(value)):
        return
    dotted_options = {word.partition(".")[0].replace("_", "-") for word in arguments if "." in word.partition("=")[0]}
    # vLLM's parser appends the JSON from NAME=VALUE, so that is the last of its spelling.
    spelling_texts = [
        f"{name}.NAME=VALUE" if name in dotted_options and name not in spellings[number:] else name
        for number, name in enumerate(spellings, 1)
    ]
    file_note = " (the file of --config counts too)" * any(word.partition("=")[0] == "--config" for word in arguments)
    given_text = f"{action.option_strings[0]}: given as {' and as '.join(spelling_texts)}{file_note}"
    _raise_value_error(f"{given_text}; vLLM would use only the last")


def _reads_any_json(action: Any) -> bool:
    """Return whether vLLM parses an option only by ``json.loads``, and its default is not a list."""
    try:
        return action.type("[{}]") == [{}] and not isinstance(action.default, list)
    except Exception:
        return False


def reset_options(parsed: Any, should_reset: Callable[[str], bool]) -> list[str]:
    """Set options to vLLM's defaults. Return the names of those that had another value, as vLLM's help prints them.

    ``should_reset`` returns whether to reset an option, by its name in the namespace, such as "max_num_seqs".
    """
    defaults = vars(serve_parser().parse_args([]))
    changed_names = [name for name, value in vars(parsed).items() if should_reset(name) and value != defaults.get(name)]
    for name in changed_names:
        setattr(parsed, name, defaults.get(name))
    return ["--" + name.replace("_", "-") for name in changed_names]


def _raise_value_error(message: str) -> NoReturn:
    """Raise ValueError with a message of one line. argparse would print and exit, and pydantic has several lines."""
    raise ValueError(" ".join(message.split()))


def engine_args(parsed: Any, folder: Path) -> tuple[Any, list[str]]:
    """Return vLLM's ``AsyncEngineArgs`` from parsed options, and notes on how the config in ``folder`` is read.

    There is a note if a server with the whole checkpoint would read the config in another way. This happens with
    ``params.json``, and if the config's class is a Python file of the checkpoint that is not here. Without its class a
    config is read field by field.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    args, fields = AsyncEngineArgs.from_cli_args(parsed), config_fields(folder)
    if not fields:
        if args.config_format != "auto":
            return args, []
        args.config_format = "mistral"  # vLLM detects it by the names of the checkpoint's files
        return args, ["params.json is read as by --config-format mistral"]
    python_file = str((fields.get("auto_map") or {}).get("AutoConfig", "")).partition(".")[0]
    if args.trust_remote_code and python_file and (folder / f"{python_file}.py").is_file():
        return args, []
    args.trust_remote_code = False
    model_type = fields.get("model_type")
    if _has_config_class(model_type) or args.config_format != "auto":
        return args, []
    args.config_format = _register_fields_parser(model_type, fields)
    note = (
        f"neither vLLM nor transformers has a config class for {model_type!r}: its fields were read as they stand; for "
        "more, put the checkpoint's Python files into the same folder"
    )
    return args, [note]


def _has_config_class(model_type: Any) -> bool:
    """Return whether vLLM or transformers has a config class for this ``model_type``."""
    from transformers import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    return model_type in _CONFIG_REGISTRY or model_type in CONFIG_MAPPING


def _register_fields_parser(model_type: Any, fields: dict[str, Any]) -> str:
    """Register a parser with vLLM that reads a config from its ``fields``. Return its ``config_format``."""
    from transformers import PreTrainedConfig
    from vllm.transformers_utils import config as configs
    from vllm.transformers_utils.config_parser_base import ConfigParserBase

    # transformers reads numbers of the config, such as its positions, before it has set them.
    numbers = {
        name: value for name, value in fields.items()
        if isinstance(value, (int, float)) and not hasattr(PreTrainedConfig, name)
    }  # fmt: skip
    config_class: Any = type(PreTrainedConfig.__name__, (PreTrainedConfig,), numbers | {WITHOUT_CLASS_ATTRIBUTE: True})

    class FieldsParser(ConfigParserBase):
        def parse(self, model: Any, *_: Any, **__: Any) -> tuple[dict[str, Any], Any]:
            try:
                return dict(fields), config_class.from_dict(dict(fields))
            except Exception as error:
                raise ConfigClassError(model_type, error) from error

    configs.register_config_parser("aiter_mla_as_it_stands")(FieldsParser)
    return "aiter_mla_as_it_stands"


WITHOUT_CLASS_ATTRIBUTE = "aiter_mla_without_class"
"""An attribute of configs that were read without their class."""


class ConfigClassError(RuntimeError):
    """A config cannot be read without its class, which is a Python file of the checkpoint. vLLM is not at fault."""

    def __init__(self, model_type: Any, error: BaseException) -> None:
        problem = f"{type(error).__name__}: {error}"
        super().__init__(f"the config class of {model_type!r} is not here, and its fields are not enough: {problem}")


def missing_field_error(error: BaseException) -> ConfigClassError | None:
    """Return the error to show if vLLM read a missing field of a config without its class. Otherwise return None."""
    config = getattr(error, "obj", None)
    if isinstance(error, AttributeError) and hasattr(type(config), WITHOUT_CLASS_ATTRIBUTE):
        return ConfigClassError(getattr(config, "model_type", ""), error)
    return None


def config_fields(folder: Path) -> dict[str, Any]:
    """Return the fields of ``config.json``. A folder that has only Mistral's ``params.json`` gives an empty dict."""
    path = folder / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def has_variable(name: str) -> bool:
    """Return whether this vLLM has an environment variable of that name."""
    from vllm import envs

    return name in envs.environment_variables


def variable_names() -> list[str]:
    """Return the names of all environment variables of this vLLM."""
    from vllm import envs

    return list(envs.environment_variables)


def switch_states() -> dict[str, bool]:
    """Return ``VARIABLES`` as vLLM reads them in this process. A variable that this release does not have is off.

    Raises:
        ValueError: vLLM cannot read a value, and would not start. The message names variable and value.
    """
    from vllm import envs

    states = {}
    for name in VARIABLES:
        try:
            states[name] = bool(envs.environment_variables.get(name, bool)())
        except ValueError as error:
            raise ValueError(f"{name}={os.environ[name]}: {error}") from error
    return states
