# SPDX-License-Identifier: Apache-2.0
"""Keep the figures of a timing for the next start: one file for each layer shape of each rank.

The figures of a file are valid only for the facts in its key. ``key_of`` lists these facts.
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

DRIVER_VERSION_FILES = (Path("/sys/module/amdgpu/version"), Path("/sys/module/nvidia/version"))
"""Each has the version of a driver, if the driver was installed separately from the Linux kernel."""


@dataclass(frozen=True)
class KeptFigures:
    """The record in the file of one layer shape.

    Raises:
        ValueError: a token count has no figures of vLLM, or its candidates do not have equally many figures.
    """

    key: dict[str, JsonValue]
    rounds: Rounds
    evidence: files.Stamp = files.stamp_field("measured")

    def __post_init__(self) -> None:
        for tokens, by_kernel in self.rounds.items():
            num_figures = {len(figures) for figures in by_kernel.values()}
            if len(num_figures) != 1 or not by_kernel.get(VLLM):
                raise ValueError(f"figures are missing at {tokens} tokens")


def key_of(
    config: Any, shape: LayerShape, backends: Mapping[str, KernelBackend], token_counts: Sequence[int], rank: int
) -> dict[str, Any]:
    """Return the key of a timing: all facts that its figures depend on.

    Args:
        config: the worker's ``VllmConfig``.
        shape: the shape of the layers.
        backends: the candidates, by name.
        token_counts: the token counts to time.
        rank: the rank of this worker.
    """
    calls = [meta_inputs(shape, count) for count in token_counts]
    return {
        "machine": machine_key(),
        "code": packages.fingerprint(),
        "shape": shape.in_words(),
        # The time of vLLM's own kernels depends on what vLLM compiles.
        "compiled": compat_config.compiled_as(config),
        "graphs": bool(compat_config.graph_sizes(config).full),
        "engine": compat_config.metric_labels(config)["engine"],
        "rank": rank,
        "counts": list(token_counts),
        # The variant of each kernel: another tile has other figures.
        "candidates": {name: [backend.kernel_of(call) for call in calls] for name, backend in backends.items()},
    }


def machine_key() -> dict[str, str | None]:
    """Return the facts that the figures of all kernels depend on: the card, its driver, the versions and the host.

    The card is known by its model: cards of one model on one host are taken as equal.
    """
    stamp = files.stamp("measured")
    versions = {name: getattr(stamp, name) for name in ("plugin", "vllm", "aiter", "host")}
    # A partition of a card has fewer compute units, and may have the name of the whole card.
    return stopwatch.machine() | {"units": str(card().units()), "driver": _driver_version()} | versions


def _driver_version() -> str:
    """Return the version of the card's driver, or of the Linux kernel if the driver came with the kernel."""
    for path in DRIVER_VERSION_FILES:
        with contextlib.suppress(OSError):
            return path.read_text().strip()
    return os.uname().release


def path_of(folder: Path, key: Mapping[str, Any]) -> Path:
    """Return the file for a key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"measured-{digest[:16]}.json"


def read(folder: Path, key: Mapping[str, Any]) -> KeptFigures | None:
    """Return the record that an earlier start kept for ``key``, or None.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file does not hold such a record.
    """
    try:
        record = files.read_from_earlier_start(KeptFigures, path_of(folder, key))
    except FileNotFoundError:
        return None
    return record if record.key == dict(key) else None


def write(folder: Path, key: Mapping[str, Any], rounds: Rounds) -> None:
    """Keep ``rounds`` for ``key``, and remove old files; see ``files.write_for_later_starts``.

    Raises:
        OSError: the file cannot be written.
        ValueError: ``rounds`` is empty, or a round lacks a kernel.
    """
    files.write_for_later_starts(path_of(folder, key), KeptFigures(dict(key), rounds), pattern="measured-*.json")
