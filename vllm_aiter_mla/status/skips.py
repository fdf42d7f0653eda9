# SPDX-License-Identifier: Apache-2.0
"""Why graphs skip layers, kept in a file: a warm start loads the graphs of a cold start, and runs no pass."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import Skip


@dataclass(frozen=True)
class KeptSkips:
    """The reasons of a cold start, for warm starts."""

    skipped: dict[str, Skip]  # by layer
    evidence: files.Stamp = files.stamp_field("skips")


def read(folder: Path, key: str, rank: int) -> dict[str, Skip]:
    """Return the reasons that earlier starts have kept, by layer; an empty dict if there is no file.

    Args:
        folder: where the plugin keeps its files.
        key: identifies the configuration.
        rank: of this worker.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is too large, or is not such a record.
    """
    try:
        return files.read_from_earlier_start(KeptSkips, _skips_path(folder, key, rank)).skipped
    except FileNotFoundError:
        return {}


def add(
    folder: Path, key: str, rank: int, skipped: Mapping[str, Skip], called_layers: Collection[str] = ()
) -> dict[str, Skip]:
    """Add why the graphs that this start compiled skip layers, and return all kept reasons.

    A start that compiles some graphs and loads others, as with a draft model, adds its reasons to the kept ones. A file
    that cannot be read is replaced.

    Args:
        folder: where the plugin keeps its files; made if it is missing.
        key: identifies the configuration.
        rank: of this worker.
        skipped: the reasons by layer.
        called_layers: layers whose op was called. No graph skips these layers any more.

    Raises:
        OSError: the file cannot be written.
    """
    earlier = dict[str, Skip]()
    with suppress(OSError, ValueError):
        earlier = read(folder, key, rank)
    reasons = {name: skip for name, skip in {**earlier, **skipped}.items() if name not in called_layers}
    files.write_for_later_starts(_skips_path(folder, key, rank), KeptSkips(reasons), pattern="skips-*.json")
    return reasons


def _skips_path(folder: Path, key: str, rank: int) -> Path:
    return folder / f"skips-{key[:16]}-{rank}.json"
