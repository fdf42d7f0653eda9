"""Values from a file, checked and cleaned: only what a shape names gets through, of the type that it says.

A shape is a type (``str``, ``int``, ``bool``; ``float`` takes integers too), a set of allowed values, a dict of fields,
``[shape]`` for a list, ``(a, b)`` for a list of that length, or one of the classes below.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from vllm_aiter_mla.commands.printable import printable

# Past it a figure is no count, size or time of ours, and float arithmetic on it may overflow.
LARGEST = 10**15
_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class Map:
    """A mapping whose keys are data too; each must match ``key`` in full, ``words`` says what that is."""

    value: Any
    key: str = r"[\s\S]*"
    words: str = "a string"


@dataclass(frozen=True, slots=True)
class Maybe:
    """A value, or null."""

    shape: Any


@dataclass(frozen=True, slots=True)
class Given:
    """A field that may be missing; ``default`` stands for it then."""

    shape: Any
    default: Any


class ShapeError(ValueError):
    """A value is missing or not of its shape; the message names the field, what is expected, and the value."""


def _wrong(field: str, expected: str, value: object) -> ShapeError:
    return ShapeError(f"{field}: {expected} expected, found {_short(value)}")


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def take(value: Any, shape: Any, field: str = "") -> Any:
    """A copy of ``value`` that holds what ``shape`` names, its strings and keys printable.

    Raises:
        ShapeError: something is missing or of another type.
    """
    if isinstance(shape, Maybe):
        return None if value is None else take(value, shape.shape, field)
    if isinstance(shape, Map | dict) and not isinstance(value, dict):
        raise _wrong(field, "a mapping", value)
    if isinstance(shape, list | tuple) and not isinstance(value, list):
        raise _wrong(field, "a list" if isinstance(shape, list) else f"a list of {len(shape)}", value)
    if isinstance(shape, Map):
        for key in value:
            if re.fullmatch(shape.key, key) is None:
                raise _wrong(f"key of {field}", shape.words, key)
        return {printable(key): take(one, shape.value, f"{field}[{_short(key)}]") for key, one in value.items()}
    if isinstance(shape, dict):
        return _record(value, shape, field)
    if isinstance(shape, list | tuple):
        parts = shape * len(value) if isinstance(shape, list) else shape
        if len(parts) != len(value):
            raise _wrong(field, f"a list of {len(parts)}", value)
        return [take(one, part, f"{field}[{n}]") for n, (one, part) in enumerate(zip(value, parts, strict=True))]
    return _plain(value, shape, field)


def _record(value: dict[str, Any], shape: dict[str, Any], field: str) -> dict[str, Any]:
    found = {}
    for name, part in shape.items():
        place = f"{field}.{name}" if field else name
        if name in value:
            found[name] = take(value[name], part.shape if isinstance(part, Given) else part, place)
        elif isinstance(part, Given):
            found[name] = part.default
        else:
            raise ShapeError(f"{place}: missing")
    return found


def _plain(value: Any, shape: Any, field: str) -> Any:
    if isinstance(shape, frozenset):
        if not isinstance(value, str) or value not in shape:
            raise _wrong(field, "one of " + ", ".join(sorted(shape)), value)
        return value
    wanted = (int, float) if shape is float else shape
    if not isinstance(value, wanted) or (isinstance(value, bool) and shape is not bool):
        raise _wrong(field, _NAMES[shape], value)
    if isinstance(value, str):
        return printable(value)
    if not isinstance(value, bool) and not abs(value) <= LARGEST:
        raise _wrong(field, f"a number of at most {LARGEST:.0e}", value)
    return value
