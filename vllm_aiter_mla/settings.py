"""The plugin's settings: one frozen record, read from two spellings and checked before an engine starts.

Spelling one is two fields of vLLM's ``pass_config``; spelling two is ``additional_config={"aiter_mla": {...}}``::

    pass_config.fuse_aiter_qk_rope_kvcache_mla              bool, default false
    pass_config.aiter_qk_rope_kvcache_fusion_max_token_num  int > 0, default unset
    additional_config.aiter_mla.enabled | max_token_num | integration | kernel | measure | aiter_view | strict | debug

What "given" means. In ``additional_config`` a key that is present is given (``max_token_num: null`` counts as
unset). In ``pass_config`` vLLM fills every field, so an explicit ``false`` cannot be told from the default: the flag
counts as given there only when it is true, the threshold only when it is not ``None``. Two given values that differ
are an error. This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

NAMESPACE = "aiter_mla"
"""Key of the plugin's mapping inside ``additional_config``; also the plugin's entry point name."""

FLAG_FIELD = "fuse_aiter_qk_rope_kvcache_mla"
LIMIT_FIELD = "aiter_qk_rope_kvcache_fusion_max_token_num"
PASS_CONFIG_FIELDS = (FLAG_FIELD, LIMIT_FIELD)

INTEGRATION_OPTIONS = ("auto", "passes", "module")
KERNELS = ("auto", "aiter", "triton", "vllm", "reference")
AITER_VIEWS = ("auto", "as-is", "per-head", "opt")
STOP_AFTER = ("rope_kv_cache", "q_prep_lift")
ROUNDINGS = ("single", "two")


STRICT_OPTION = "additional_config.aiter_mla.strict=true"
"""How an error names the option that made it one."""


class SettingsError(ValueError):
    """A wrong option: unknown key, wrong type or range, or two spellings that differ. Names option and value."""


@dataclass(frozen=True)
class DebugSettings:
    """Switches for bisecting and testing, never for serving.

    Attributes:
        stop_after: leave the chain of passes after this one, for every layer; ``None`` runs all three.
        rounding: ``single`` rounds the rotated half once, as AITER does; ``two`` rounds it to the activation dtype
            first, as vLLM's kernels and its compiled graph do, so that fp8 runs can be compared bit for bit.
        untested_vllm: engage on a vLLM release outside the supported window.
    """

    stop_after: str | None = None
    rounding: str = "single"
    untested_vllm: bool = False


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Attributes:
        enabled: the one switch.
        max_token_num: decode limit in tokens; ``None`` derives it from the scheduler's bounds.
        integration: who puts the one op into the layers, ``auto``: the passes if they can run.
        kernel: which back end prepares the query, one of ``KERNELS``.
        measure: with kernel ``auto``, time the kernels and vLLM's own at start-up and run the fastest.
        aiter_view: which of AITER's two decode kernels to reach by the view of the cache: one of ``AITER_VIEWS``, or
            the number of tokens from which opt is taken instead of per-head. See docs/aiter.md.
        strict: turn every decline into an error instead of a warning.
        debug: see :class:`DebugSettings`.
    """

    enabled: bool = False
    max_token_num: int | None = None
    integration: str = "auto"
    kernel: str = "auto"
    measure: bool = True
    aiter_view: str | int = "auto"
    strict: bool = False
    debug: DebugSettings = field(default_factory=DebugSettings)

    @property
    def measures(self) -> bool:
        """Whether kernels are timed at start-up: with ``auto`` alone, and where the third pass may run."""
        return self.measure and self.kernel == "auto" and self.debug.stop_after is None


def resolve(pass_config_values: Mapping[str, object], additional_config: object) -> Settings:
    """Merge both spellings into one :class:`Settings`.

    Args:
        pass_config_values: the two ``PASS_CONFIG_FIELDS``; a missing key or ``None`` means not given.
        additional_config: vLLM's ``additional_config``; anything but a mapping holds no options of ours.

    Raises:
        SettingsError: naming the option and the value.
    """
    flag, limit = _read_pass_config(pass_config_values)
    given = _read_namespace(additional_config)
    debug = given.get("debug", DebugSettings())
    _check_integration(given.get("integration", "auto"), debug)
    return Settings(
        enabled=_merge_flag(flag, given.get("enabled")),
        max_token_num=_merge_limit(limit, given.get("max_token_num")),
        integration=given.get("integration", "auto"),
        kernel=given.get("kernel", "auto"),
        measure=given.get("measure", True),
        aiter_view=given.get("aiter_view", "auto"),
        strict=given.get("strict", False),
        debug=debug,
    )


def unused_options(settings: Settings) -> tuple[str, ...]:
    """Names of the options that were set although ``enabled`` is false, so that they have no effect."""
    if settings.enabled:
        return ()
    default = asdict(Settings())
    return tuple(name for name, value in asdict(settings).items() if value != default[name])


def _read_pass_config(values: Mapping[str, object]) -> tuple[bool, int | None]:
    _reject_unknown("pass_config", values, PASS_CONFIG_FIELDS)
    flag = values.get(FLAG_FIELD)
    limit = values.get(LIMIT_FIELD)
    return (
        flag is not None and _bool(f"pass_config.{FLAG_FIELD}", flag),
        None if limit is None else _positive_int(f"pass_config.{LIMIT_FIELD}", limit),
    )


def _read_namespace(additional_config: object) -> dict[str, Any]:
    """Checked values of the keys that are present under ``additional_config["aiter_mla"]``."""
    # additional_config may also be an object of another plugin's that only offers compute_hash(): nothing of ours.
    if not isinstance(additional_config, Mapping) or NAMESPACE not in additional_config:
        return {}
    prefix = f"additional_config.{NAMESPACE}"
    options = _mapping(prefix, additional_config[NAMESPACE])
    readers = {
        "enabled": _bool,
        "max_token_num": lambda name, value: None if value is None else _positive_int(name, value),
        "integration": lambda name, value: _choice(name, value, INTEGRATION_OPTIONS),
        "kernel": lambda name, value: _choice(name, value, KERNELS),
        "measure": _bool,
        "aiter_view": _view,
        "strict": _bool,
        "debug": _debug,
    }
    _reject_unknown(prefix, options, readers)
    return {key: readers[key](f"{prefix}.{key}", value) for key, value in options.items()}


def _debug(name: str, value: object) -> DebugSettings:
    options = _mapping(name, value)
    _reject_unknown(name, options, ("stop_after", "rounding", "untested_vllm"))
    stop_after = options.get("stop_after")
    return DebugSettings(
        stop_after=None if stop_after is None else _choice(f"{name}.stop_after", stop_after, STOP_AFTER),
        rounding=_choice(f"{name}.rounding", options.get("rounding", "single"), ROUNDINGS),
        untested_vllm=_bool(f"{name}.untested_vllm", options.get("untested_vllm", False)),
    )


def _check_integration(integration: str, debug: DebugSettings) -> None:
    if integration == "module" and debug.stop_after is not None:
        prefix = f"additional_config.{NAMESPACE}"
        raise SettingsError(
            f"{prefix}.integration=module and {prefix}.debug.stop_after={debug.stop_after} contradict each other; "
            "only the passes can stop early"
        )


def _merge_flag(flag: bool, enabled: bool | None) -> bool:
    if flag and enabled is False:
        raise SettingsError(
            f"pass_config.{FLAG_FIELD}=true and additional_config.{NAMESPACE}.enabled=false contradict each other; "
            "give one of them"
        )
    return flag or bool(enabled)


def _merge_limit(limit: int | None, max_token_num: int | None) -> int | None:
    if limit is not None and max_token_num is not None and limit != max_token_num:
        raise SettingsError(
            f"pass_config.{LIMIT_FIELD}={limit} and additional_config.{NAMESPACE}.max_token_num={max_token_num} "
            "contradict each other; give one of them"
        )
    return max_token_num if limit is None else limit


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise SettingsError(f"{name}: expected true or false, got {_shown(value)}")
    return value


def _positive_int(name: str, value: object) -> int:
    # bool is a subclass of int in Python; max_token_num=true would otherwise mean one token.
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingsError(f"{name}: expected a whole number of tokens above 0, got {_shown(value)}")
    if value <= 0:
        raise SettingsError(f"{name}: expected a whole number of tokens above 0, got {value}")
    return value


def _choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise SettingsError(f"{name}: expected one of {', '.join(choices)}, got {_shown(value)}")
    return value


def _view(name: str, value: object) -> str | int:
    if isinstance(value, str):
        return _choice(name, value, AITER_VIEWS)
    return _positive_int(name, value)


def _mapping(name: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise SettingsError(f"{name}: expected a mapping of options, got {_shown(value)}")
    return value


def _reject_unknown(prefix: str, options: Mapping[str, object], known: Iterable[str]) -> None:
    known = tuple(known)
    for key in options:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise SettingsError(f"{prefix}.{key}={options[key]!r}: unknown option; {hint}known: {', '.join(known)}")


def _shown(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"
