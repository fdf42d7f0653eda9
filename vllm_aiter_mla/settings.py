# SPDX-License-Identifier: Apache-2.0
"""The plugin's options: one frozen record, read from two spellings and checked before an engine starts.

Spelling one is two fields of vLLM's ``pass_config``. Spelling two is ``additional_config={"aiter_mla": {...}}``::

    pass_config.fuse_aiter_qk_rope_kvcache_mla              bool, default false
    pass_config.aiter_qk_rope_kvcache_fusion_max_token_num  int > 0, default unset
    additional_config.aiter_mla.enabled | max_token_num | integration | kernel | measure | strict | debug

In ``additional_config`` a key that is present counts as given, except ``max_token_num: null``. vLLM fills every field
of ``pass_config``, so there the flag counts as given only if it is true, and the limit only if it is not ``None``.
Two given values that differ are an error. This module imports neither torch nor vLLM.
"""

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, StrictBool, TypeAdapter, ValidationError

NAMESPACE = "aiter_mla"
"""Key of the plugin's mapping inside ``additional_config``, and name of the plugin's entry point."""
OPTIONS = f"additional_config.{NAMESPACE}"
STRICT_OPTION = f"{OPTIONS}.strict=true"
"""How an error names the option that made it an error."""
FLAG_FIELD = "fuse_aiter_qk_rope_kvcache_mla"
LIMIT_FIELD = "aiter_qk_rope_kvcache_fusion_max_token_num"
PASS_CONFIG_FIELDS = (FLAG_FIELD, LIMIT_FIELD)
_BOTH = {"enabled": FLAG_FIELD, "max_token_num": LIMIT_FIELD}
"""The options that have two spellings."""

Integration = Literal["auto", "passes", "module"]
Kernel = Literal["auto", "aiter", "aiter-opt", "triton", "vllm", "reference"]
Rounding = Literal["single", "two", "three"]
Tokens = Annotated[int, Field(strict=True, gt=0)]

KERNELS = get_args(Kernel)
ROUNDINGS = get_args(Rounding)


class SettingsError(ValueError):
    """A wrong option: unknown key, wrong type or range, or two spellings that differ. Names option and value."""


@dataclass(frozen=True)
class DebugSettings:
    """Switches for bisecting and testing, never for serving."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    # How the reference kernel rounds, so that runs can be compared bit for bit: ``single`` rounds the rotated half
    # once, as AITER does; ``two`` to the activation dtype first, as vLLM's compiled graph does; ``three`` each product
    # too, as vLLM's fused RoPE + KV write does
    rounding: Rounding = "single"
    untested_vllm: StrictBool = False  # engage on a vLLM release outside the supported window


@dataclass(frozen=True)
class Settings:
    """What the user asked for."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    enabled: StrictBool = False  # the one switch
    max_token_num: Tokens | None = None  # decode limit in tokens; ``None`` derives it from the scheduler's bounds
    # What puts the op into the layers; ``auto`` is the passes if they can run, else the module
    integration: Integration = "auto"
    kernel: Kernel = "auto"  # which back end prepares the query, one of ``KERNELS``
    # With kernel ``auto``, time the kernels at start-up and run the fastest; ``again`` reads no earlier figures
    measure: StrictBool | Literal["again"] = True
    strict: StrictBool = False  # raise an error instead of skipping the engine with a warning
    debug: DebugSettings = field(default_factory=DebugSettings)  # see :class:`DebugSettings`

    @property
    def measures(self) -> bool:
        """Whether kernels are timed at start-up: only with kernel ``auto``."""
        return bool(self.measure) and self.kernel == "auto"


def resolve(pass_config_values: Mapping[str, object], additional_config: object) -> Settings:
    """Merge both spellings into one :class:`Settings`.

    Args:
        pass_config_values: the two ``PASS_CONFIG_FIELDS``; a missing key or ``None`` means not given.
        additional_config: vLLM's ``additional_config``; anything but a mapping holds no options of ours.

    Raises:
        SettingsError: naming the option and the value.
    """
    ours: dict[str, Any] = {}
    # additional_config may also be another plugin's object that only offers compute_hash().
    if isinstance(additional_config, Mapping) and NAMESPACE in additional_config:
        found = additional_config[NAMESPACE]
        if not isinstance(found, Mapping):
            raise SettingsError(f"{OPTIONS}: expected a mapping of options, got {_shown(found)}")
        ours = dict(found)
    _check(ours, lambda name: f"{OPTIONS}.{name}")
    flags = {name: value for name, key in _BOTH.items() if (value := pass_config_values.get(key)) is not None}
    _check(flags, lambda name: f"pass_config.{_BOTH[name]}")
    given = {name: value for name, value in flags.items() if value is not False}
    for name, value in given.items():
        other = ours.get(name)
        if other is not None and other != value:
            both = f"pass_config.{_BOTH[name]}={_spelt(value)} and {OPTIONS}.{name}={_spelt(other)}"
            raise SettingsError(f"{both} contradict each other; give one of them")
    return _reader().validate_python(ours | given)


@functools.cache
def _reader() -> TypeAdapter[Settings]:
    """Made at the first config: most processes only register the plugin."""
    return TypeAdapter(Settings)


def near_misses(additional_config: object) -> tuple[str, ...]:
    """Return the keys of ``additional_config`` that look like the plugin's options and are not read."""
    if not isinstance(additional_config, Mapping):
        return ()
    ours = [_letters(name) for name in (NAMESPACE, *PASS_CONFIG_FIELDS)]

    def looks_like_ours(key: str) -> bool:
        letters = _letters(key)
        return ours[0] in letters or bool(difflib.get_close_matches(letters, ours, n=1, cutoff=0.8))

    return tuple(key for key in map(str, additional_config) if key != NAMESPACE and looks_like_ours(key))


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


def set_options(settings: Settings) -> tuple[str, ...]:
    """Return the names of the options that are not at their defaults."""
    return tuple(one.name for one in fields(Settings) if getattr(settings, one.name) != getattr(Settings(), one.name))


def _check(options: dict[str, Any], named: Callable[[str], str]) -> None:
    """Raise SettingsError for the first wrong option; ``named`` gives an option as the user spells it."""
    try:
        _reader().validate_python(options)
        return
    except ValidationError as error:
        # An option that takes two types has an error for each of them, all under its name.
        found = [one for one in error.errors() if one["loc"][0] == error.errors()[0]["loc"][0]]
    where, value = found[0]["loc"], found[0]["input"]
    is_debug = where[0] == "debug" and len(where) > 1
    name = ".".join(map(str, where[: 1 + is_debug]))
    if found[0]["type"] == "unexpected_keyword_argument":
        known = [one.name for one in fields(DebugSettings if is_debug else Settings)]
        close = difflib.get_close_matches(str(where[-1]), known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise SettingsError(f"{named(name)}={value!r}: unknown option; {hint}known: {', '.join(known)}")
    wrong = " or ".join(dict.fromkeys(one["msg"].replace("Input should be", "expected") for one in found))
    raise SettingsError(f"{named(name)}: {wrong}, got {_shown(value)}")


def _spelt(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _shown(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"
