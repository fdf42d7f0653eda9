"""Figures kept under the cache root, so that the next start is quick and chooses the same."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_aiter_mla import files
from vllm_aiter_mla.kernels.measure.table import Rounds

LARGEST = 2**20
"""Bytes of a file that are read; 12 token counts of 3 candidates take some 10 kB."""


def path_of(folder: Path, key: Mapping[str, Any]) -> Path:
    """The file for what ``key`` says of card, driver, versions and layer shape."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"measured-{digest[:16]}.json"


def read(folder: Path, key: Mapping[str, Any]) -> Rounds | None:
    """The figures kept for ``key``; None where there are none.

    Raises:
        ValueError: the file is broken, too large, or holds something else; the message names it.
    """
    path = path_of(folder, key)
    try:
        found = files.read(path, LARGEST)
        _check(found, key)
        return {int(tokens): _figures(by, key) for tokens, by in found["rounds"].items()}
    except FileNotFoundError:
        return None
    except Exception as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error


def write(folder: Path, key: Mapping[str, Any], rounds: Rounds) -> None:
    """Keep ``rounds`` for ``key``, in one step.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files.write(path_of(folder, key), {"key": dict(key), "rounds": rounds} | _stamp())


def _stamp() -> dict[str, Any]:
    return files.stamp("measured", 1)


def _check(found: dict[str, Any], key: Mapping[str, Any]) -> None:
    ours, theirs = (one[files.KEY] for one in (_stamp(), found))
    if any(theirs[name] != ours[name] for name in ("schema", "schema_version")):
        raise ValueError(f"{theirs['schema']} {theirs['schema_version']} is another layout")
    if found["key"] != dict(key):
        raise ValueError("it is of another card, version or layer shape")
    if sorted(map(int, found["rounds"])) != sorted(key["counts"]):
        raise ValueError("it holds other token counts")


def _figures(by: dict[str, list[float]], key: Mapping[str, Any]) -> dict[str, list[float]]:
    """One count's figures, positive numbers of known candidates, as many for each of them."""
    if not set(by) <= set(key["candidates"]) or "vllm" not in by:
        raise ValueError(f"unknown candidates, or none to compare with: {', '.join(by)}")
    lengths = {len(values) for values in by.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError("candidates of one token count need as many rounds each")
    for value in (value for values in by.values() for value in values):
        if type(value) not in (int, float) or not (math.isfinite(value) and value > 0):
            raise ValueError(f"microseconds above 0 expected, not {value!r:.40}")
    return by
