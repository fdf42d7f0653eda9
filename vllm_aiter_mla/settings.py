# SPDX-License-Identifier: Apache-2.0
"""The plugin's options: one frozen record, read from two spellings and checked before an engine starts.

The first spelling is two fields of vLLM's ``pass_config``. The second is ``additional_config={"aiter_mla": {...}}``::

    pass_config.fuse_aiter_qk_rope_kvcache_mla              bool, default false
    pass_config.aiter_qk_rope_kvcache_fusion_max_token_num  int > 0, default unset
    additional_config.aiter_mla.enabled | max_token_num | integration | kernel | measure | strict | debug

The user has given each key that is present in ``additional_config``, except ``max_token_num: null``. vLLM fills every
field of ``pass_config``. So there the user has given the flag only if it is true, and the limit only if it is not
``None``. Two given values that differ are an error. This module imports neither torch nor vLLM.
"""

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, StrictBool, TypeAdapter, ValidationError

NAMESPACE = "aiter_mla"
"""Key of the plugin's mapping inside ``additional_config``, and name of the plugin's entry point."""
OPTION_PREFIX = f"additional_config.{NAMESPACE}"
"""How an option of the second spelling begins."""
STRICT_OPTION = f"{OPTION_PREFIX}.strict=true"
"""How an error of strict mode names the option that caused it."""
FLAG_FIELD = "fuse_aiter_qk_rope_kvcache_mla"
LIMIT_FIELD = "aiter_qk_rope_kvcache_fusion_max_token_num"
PASS_CONFIG_FIELDS = (FLAG_FIELD, LIMIT_FIELD)
_PASS_CONFIG_SPELLINGS = {"enabled": FLAG_FIELD, "max_token_num": LIMIT_FIELD}
"""Field of ``pass_config`` for each option that has two spellings."""

Integration = Literal["auto", "passes", "module"]
Kernel = Literal["auto", "aiter", "aiter-opt", "triton", "vllm", "reference"]
Rounding = Literal["single", "two", "three"]
Tokens = Annotated[int, Field(strict=True, gt=0)]

KERNELS = get_args(Kernel)
ROUNDINGS = get_args(Rounding)


class SettingsError(ValueError):
    """An option is wrong: unknown key, wrong type or range, or two spellings that differ. Names option and value."""


@dataclass(frozen=True)
class DebugSettings:
    """Switches for bisecting and testing, never for serving."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    # How the reference kernel rounds, so that runs can be compared bit for bit. ``single`` rounds the rotated half
    # once, as AITER does. ``two`` first rounds to the activation dtype, as vLLM's compiled graph does. ``three`` also
    # rounds each product, as vLLM's fused RoPE + KV write does
    rounding: Rounding = "single"
    untested_vllm: StrictBool = False  # engage on a vLLM release outside the supported window


@dataclass(frozen=True)
class Settings:
    """What the user asked for."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    enabled: StrictBool = False  # whether the plugin is switched on
    max_token_num: Tokens | None = None  # decode limit in tokens; None derives the limit from the scheduler's bounds
    # What puts the op into the layers; ``auto`` means the passes if they can run, else the module
    integration: Integration = "auto"
    kernel: Kernel = "auto"  # which back end prepares the query, one of ``KERNELS``
    # With kernel ``auto``, time the kernels at start-up and run the fastest; ``again`` reads no earlier figures
    measure: StrictBool | Literal["again"] = True
    strict: StrictBool = False  # raise an error instead of skipping the engine with a warning
    debug: DebugSettings = field(default_factory=DebugSettings)  # see :class:`DebugSettings`

    @property
    def has_timing(self) -> bool:
        """Whether kernels are timed at start-up. They are timed only with kernel ``auto``."""
        return bool(self.measure) and self.kernel == "auto"


def resolve_settings(pass_config_values: Mapping[str, object], additional_config: object) -> Settings:
    """Merge both spellings into one :class:`Settings`.

    Args:
        pass_config_values: the two ``PASS_CONFIG_FIELDS``; the user has not given a field that is missing or ``None``.
        additional_config: vLLM's ``additional_config``; only a mapping can hold options of the plugin.

    Raises:
        SettingsError: an option is wrong. The message names the option and the value.
    """
    options: dict[str, Any] = {}
    # additional_config may also be another plugin's object that only offers compute_hash().
    if isinstance(additional_config, Mapping) and NAMESPACE in additional_config:
        entry = additional_config[NAMESPACE]
        if not isinstance(entry, Mapping):
            raise SettingsError(f"{OPTION_PREFIX}: expected a mapping of options, got {_value_with_type(entry)}")
        options = dict(entry)
    _check_options(options, lambda name: f"{OPTION_PREFIX}.{name}")
    pass_options = {
        name: value
        for name, field_name in _PASS_CONFIG_SPELLINGS.items()
        if (value := pass_config_values.get(field_name)) is not None
    }
    _check_options(pass_options, lambda name: f"pass_config.{_PASS_CONFIG_SPELLINGS[name]}")
    pass_options = {name: value for name, value in pass_options.items() if value is not False}
    for name, value in pass_options.items():
        other = options.get(name)
        if other is not None and other != value:
            first = f"pass_config.{_PASS_CONFIG_SPELLINGS[name]}={_option_text(value)}"
            second = f"{OPTION_PREFIX}.{name}={_option_text(other)}"
            raise SettingsError(f"{first} and {second} contradict each other; give one of them")
    return _settings_adapter().validate_python(options | pass_options)


@functools.cache
def _settings_adapter() -> TypeAdapter[Settings]:
    """Return pydantic's validator. The first config makes it, because most processes only register the plugin."""
    return TypeAdapter(Settings)


def near_misses(additional_config: object, is_enabled: bool) -> tuple[str, ...]:
    """Return the keys of ``additional_config`` that look like options of the plugin but are not read.

    The name of an option counts if the plugin is enabled; otherwise it may well be another plugin's.
    """
    if not isinstance(additional_config, Mapping):
        return ()
    namespace, *field_names = (_letters(name) for name in (NAMESPACE, *PASS_CONFIG_FIELDS))
    option_names = {option.name for option in fields(Settings)} if is_enabled else set()

    def is_similar(key: str) -> bool:
        letters = _letters(key)
        return (
            key in option_names
            or namespace in letters
            or bool(difflib.get_close_matches(letters, [namespace, *field_names], n=1, cutoff=0.8))
        )

    return tuple(key for key in map(str, additional_config) if key != NAMESPACE and is_similar(key))


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


def non_default_options(settings: Settings) -> tuple[str, ...]:
    """Return the names of the options that are not at their defaults."""
    defaults = Settings()
    names = (option.name for option in fields(Settings))
    return tuple(name for name in names if getattr(settings, name) != getattr(defaults, name))


def _check_options(options: dict[str, Any], spell: Callable[[str], str]) -> None:
    """Raise SettingsError for the first wrong option; ``spell`` returns an option as the user spells it."""
    try:
        _settings_adapter().validate_python(options)
        return
    except ValidationError as error:
        # An option that takes two types has an error for each type, all under its name.
        errors = [detail for detail in error.errors() if detail["loc"][0] == error.errors()[0]["loc"][0]]
    location, value = errors[0]["loc"], errors[0]["input"]
    is_debug = location[0] == "debug" and len(location) > 1
    name = ".".join(map(str, location[: 1 + is_debug]))
    if errors[0]["type"] == "unexpected_keyword_argument":
        valid_names = [option.name for option in fields(DebugSettings if is_debug else Settings)]
        matches = difflib.get_close_matches(str(location[-1]), valid_names, n=1)
        hint = f"did you mean {matches[0]!r}? " if matches else ""
        raise SettingsError(f"{spell(name)}={value!r}: unknown option; {hint}known: {', '.join(valid_names)}")
    expected = " or ".join(dict.fromkeys(detail["msg"].replace("Input should be", "expected") for detail in errors))
    raise SettingsError(f"{spell(name)}: {expected}, got {_value_with_type(value)}")


def _option_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value_with_type(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"
