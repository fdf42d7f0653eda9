"""Reading a config: whatever is not what it should be is named with its value, never guessed around."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A head count or width; past it the products that a plan forms leave 64 bits, and no model is near.
WIDTH = 2**14
# Anything else that is counted: layers, positions, the residual stream.
COUNT = 2**31 - 1
# Names of vLLM's --dtype and of configs, by what torch calls them.
DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32", "float": "float32"}


class FieldError(ValueError):
    """A field of a config is missing or wrong; names field and value."""


def whole(config: Mapping[str, Any], key: str, most: int = COUNT, least: int = 0) -> int:
    """A whole number; 0 where the field is absent or null.

    Raises:
        FieldError: another type, or outside ``least`` to ``most``.
    """
    value = config.get(key)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int):
        raise FieldError(f"{key} is {shown(value)}: a whole number expected")
    if not least <= value <= most:
        raise FieldError(f"{key} is {shown(value)}: from {least} to {most} expected")
    return value


def mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object; empty where the field is absent or null. Raises FieldError for another type."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise FieldError(f"{key} is {shown(value)}: an object expected")
    return value


def names(config: Mapping[str, Any], key: str) -> list[str]:
    """A list of names; empty where the field is absent or null. Raises FieldError for another type."""
    value = config.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise FieldError(f"{key} is {shown(value)}: a list of names expected")
    return value


def layer_numbers(config: Mapping[str, Any], key: str) -> list[int] | None:
    """A list of different layer numbers from 1 on; None where the field is absent or null.

    Raises:
        FieldError: anything else.
    """
    value = config.get(key)
    if value is None:
        return None
    numbers = list(value) if isinstance(value, list | tuple) else []
    right = bool(numbers) and all(isinstance(one, int) and not isinstance(one, bool) and one >= 1 for one in numbers)
    if not right or len(set(numbers)) != len(numbers):
        raise FieldError(f"{key} is {shown(value)}: a list of different layer numbers from 1 on expected")
    return numbers


def dtype(value: object, what: str) -> str:
    """torch's name of a dtype, without its prefix. Raises FieldError for one that no model computes in."""
    name = value.removeprefix("torch.") if isinstance(value, str) else None
    if name not in DTYPES:
        raise FieldError(f"{what} is {shown(value)}: one of {', '.join(DTYPES)} expected")
    return DTYPES[name]


def shown(value: object) -> str:
    """A value as a message has it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
