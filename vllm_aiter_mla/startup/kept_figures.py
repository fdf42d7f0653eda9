# SPDX-License-Identifier: Apache-2.0
"""Keep the figures of a timing for the next start: one file for each layer shape of each rank.

The figures of a file hold for what its key says, and for nothing else. ``key_of`` lists the facts of the key.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from vllm_aiter_mla import files, packages
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.decided import VLLM
from vllm_aiter_mla.kernels import stopwatch
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import LayerShape, meta_inputs
from vllm_aiter_mla.kernels.stopwatch import Rounds

DRIVERS = (Path("/sys/module/amdgpu/version"), Path("/sys/module/nvidia/version"))
"""Files with the version of a driver that was installed apart from the Linux kernel."""


@dataclass(frozen=True)
class KeptFigures:
    """The record in such a file.

    Raises:
        ValueError: a count lacks vLLM's figures, or its candidates have not been timed equally often.
    """

    key: dict[str, JsonValue]
    rounds: Rounds
    evidence: files.Stamp = files.stamp_field("measured")

    def __post_init__(self) -> None:
        for tokens, by_name in self.rounds.items():
            if VLLM not in by_name or len({len(figures) for figures in by_name.values()}) != 1 or not by_name[VLLM]:
                raise ValueError(f"figures are missing at {tokens} tokens")


def key_of(
    config: Any, shape: LayerShape, backends: Mapping[str, KernelBackend], counts: Sequence[int], rank: int
) -> dict[str, Any]:
    """Return the key of this timing: all that its figures depend on.

    Args:
        config: the worker's ``VllmConfig``.
        shape: of the layers.
        backends: the candidates, by name.
        counts: the token counts that are timed.
        rank: of this worker; each rank has its own card.
    """
    calls = [meta_inputs(shape, count) for count in counts]
    return {
        "machine": machine_key(),
        "code": packages.fingerprint(),
        "shape": shape.in_words(),
        # What vLLM compiles decides what its own sequence costs.
        "compiled": compat_config.compiled_as(config),
        "graphs": bool(compat_config.graph_sizes(config).full),
        "engine": compat_config.metric_labels(config)["engine"],
        "rank": rank,
        "counts": list(counts),
        # Which variants are timed: another tile of a kernel has other figures.
        "candidates": {name: [backend.kernel_of(call) for call in calls] for name, backend in backends.items()},
    }


def machine_key() -> dict[str, str | None]:
    """Return what the figures of all kernels depend on: the card, its driver, the versions and the host."""
    stamp = files.stamp("measured")
    versions = {name: getattr(stamp, name) for name in ("plugin", "vllm", "aiter", "host")}
    # A partition of a card has fewer units, and may have the name of the whole.
    return stopwatch.machine() | {"units": str(card().units()), "driver": _driver_version()} | versions


def _driver_version() -> str:
    """Return the version of the card's driver, or that of the Linux kernel if the driver came with it."""
    for path in DRIVERS:
        with contextlib.suppress(OSError):
            return path.read_text().strip()
    return os.uname().release


def path_of(folder: Path, key: Mapping[str, Any]) -> Path:
    """Return the file for a key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"measured-{digest[:16]}.json"


def read(folder: Path, key: Mapping[str, Any]) -> KeptFigures | None:
    """Return the figures that an earlier start has kept for ``key``, or None.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file holds something else.
    """
    try:
        measured = files.read_kept(KeptFigures, path_of(folder, key))
    except FileNotFoundError:
        return None
    return measured if measured.key == dict(key) else None


def write(folder: Path, key: Mapping[str, Any], rounds: Rounds) -> None:
    """Keep ``rounds`` for ``key``, and remove files that no start uses any more; see ``files.keep``.

    Raises:
        OSError: the file cannot be written.
    """
    files.keep(path_of(folder, key), KeptFigures(dict(key), rounds), pattern="measured-*.json")
