"""Reads fields of a model config. A wrong value is an error that names field and value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Past these the products that a plan forms leave 64 bits: of a head count or width, and of layers, positions and such.
WIDTH, COUNT = 2**14, 2**31 - 1
# Names of vLLM's --dtype and of configs, by what torch calls them.
DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32", "float": "float32"}


class FieldError(ValueError):
    """A field of a config is missing or wrong; names field and value."""


def whole(config: Mapping[str, Any], key: str, most: int = COUNT, least: int = 0) -> int:
    """A whole number from ``least`` to ``most``, else FieldError; 0 where the field is absent or null."""
    value = _read(config, key, _is_whole, "a whole number")
    if value is not None and not least <= value <= most:
        raise FieldError(f"{key} is {_shown(value)}: from {least} to {most} expected")
    return value or 0


def mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object, else FieldError; empty where the field is absent or null."""
    return _read(config, key, lambda value: isinstance(value, Mapping), "an object") or {}


def names(config: Mapping[str, Any], key: str) -> list[str]:
    """A list of names, else FieldError; empty where the field is absent or null."""
    return _read(config, key, lambda value: _is_list(value, lambda one: isinstance(one, str)), "a list of names") or []


def layer_numbers(config: Mapping[str, Any], key: str) -> list[int] | None:
    """A list of different layer numbers from 1 on, else FieldError; None where the field is absent or null."""

    def right(value: Any) -> bool:
        return _is_list(value, lambda one: _is_whole(one) and one >= 1) and 0 < len(value) == len(set(value))

    return _read(config, key, right, "a list of different layer numbers from 1 on")


def dtype(value: object, what: str) -> str:
    """torch's name of a dtype, without its prefix. Raises FieldError for one that no model computes in."""
    name = value.removeprefix("torch.") if isinstance(value, str) else None
    if name not in DTYPES:
        raise FieldError(f"{what} is {_shown(value)}: one of {', '.join(DTYPES)} expected")
    return DTYPES[name]


def _read(config: Mapping[str, Any], key: str, right: Callable[[Any], bool], wanted: str) -> Any:
    value = config.get(key)
    if value is not None and not right(value):
        raise FieldError(f"{key} is {_shown(value)}: {wanted} expected")
    return value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: object, right: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(right, value))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
