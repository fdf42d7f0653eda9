"""The options given to doctor, read as vLLM would read them: a mistyped one is named instead of being passed over."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from typing import Any

from vllm_aiter_mla.commands.fields import FieldError, mapping
from vllm_aiter_mla.settings import NAMESPACE, PASS_CONFIG_FIELDS

MODES = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")
# As pydantic reads a bool that is not strict.
TRUE, FALSE = frozenset({"true", "1", "yes", "on", "t", "y"}), frozenset({"false", "0", "no", "off", "f", "n"})
# Without vLLM its own names are not known: only what is this near to one of ours is taken for a slip.
NEAR = 0.9


def check_names(compilation: Mapping[str, Any]) -> None:
    """Raise FieldError for a name in the compilation config, or in its pass_config, that vLLM does not have."""
    known = _vllms_names()
    passes = mapping(compilation, "pass_config")
    if known is not None:
        _refuse_unknown("", compilation, known[0])
        _refuse_unknown("pass_config.", passes, {*known[1], *PASS_CONFIG_FIELDS})
        return
    for name, value in passes.items():
        close = difflib.get_close_matches(name, PASS_CONFIG_FIELDS, n=1, cutoff=NEAR)
        if close and name not in PASS_CONFIG_FIELDS:
            raise FieldError(f"pass_config.{name}={value!r}: did you mean {close[0]!r}?")


def near_namespace(additional: Mapping[str, Any]) -> str | None:
    """A key of the additional config that looks like ours and is not; others' keys are theirs."""
    close = difflib.get_close_matches(NAMESPACE, [key for key in additional if key != NAMESPACE], n=1, cutoff=0.8)
    return close[0] if close else None


def splitting_ops(compilation: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The ops at which the graph is cut; None where they are not given. Raises FieldError for another type."""
    value = compilation.get("splitting_ops")
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(op, str) for op in value):
        raise FieldError(f"splitting_ops={value!r}: a list of names of ops expected")
    return tuple(value)


def flag(config: Mapping[str, Any], name: str) -> bool | None:
    """A bool in any of its spellings; None where it is not given. Raises FieldError for anything else."""
    value = config.get(name)
    if value is None:
        return None
    text = str(value).lower()
    if text not in TRUE | FALSE:
        raise FieldError(f"{name}={value!r}: true or false expected")
    return text in TRUE


def mode(compilation: Mapping[str, Any]) -> str:
    """Name of the compilation mode: vLLM takes name or number; unset means 3 at every optimisation level above 0.

    Raises:
        FieldError: neither.
    """
    value = compilation.get("mode")
    if value is None:
        return MODES[3]
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(MODES):
        return MODES[value]
    if isinstance(value, str) and value.upper() in MODES:
        return value.upper()
    raise FieldError(f"mode={value!r}: 0 to 3 or one of {', '.join(MODES)} expected")


def backend(compilation: Mapping[str, Any]) -> str:
    """The compilation back end. Raises FieldError for anything but a name."""
    value = compilation.get("backend") or "inductor"
    if not isinstance(value, str):
        raise FieldError(f"backend={value!r}: a name expected")
    return value


def _refuse_unknown(prefix: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    for name, value in given.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise FieldError(f"{prefix}{name}={value!r}: vLLM has no such option{hint}")


def _vllms_names() -> tuple[frozenset[str], frozenset[str]] | None:
    """Names in vLLM's CompilationConfig and in its PassConfig; None where they cannot be had."""
    try:
        from vllm.config import CompilationConfig, PassConfig
    except Exception:
        return None
    first, second = (
        frozenset(field.name for field in dataclasses.fields(config) if field.init)
        for config in (CompilationConfig, PassConfig)
    )
    return first, second
