# SPDX-License-Identifier: Apache-2.0
"""Why graphs skip layers, kept in a file: a warm start loads the graphs of a cold one, and runs no pass."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import Skip


@dataclass(frozen=True)
class Skips:
    """The reasons of a cold start, for warm ones."""

    skipped: dict[str, Skip]  # by layer
    evidence: files.Stamp = files.stamp_field("skips")


def read(folder: Path, key: str, rank: int) -> dict[str, Skip]:
    """Return the reasons that earlier starts have kept, by layer; none if there is no file.

    Args:
        folder: where the plugin keeps its files.
        key: identifies the configuration.
        rank: of this worker.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is too large, or holds something else.
    """
    try:
        return files.read_kept(Skips, _path_of(folder, key, rank)).skipped
    except FileNotFoundError:
        return {}


def add(
    folder: Path, key: str, rank: int, skipped: Mapping[str, Skip], called: Collection[str] = ()
) -> dict[str, Skip]:
    """Add why the graphs that this start compiled skip layers, and return all reasons that are kept now.

    A start that compiles some graphs and loads others, as with a draft model, adds its reasons to the kept ones. A file
    that cannot be read is replaced.

    Args:
        folder: as in ``read``, and so are ``key`` and ``rank``; made if it is missing.
        skipped: the reasons by layer.
        called: layers whose op was reached, so no graph skips them any more.

    Raises:
        OSError: the file cannot be written.
    """
    kept = dict[str, Skip]()
    with suppress(OSError, ValueError):
        kept = read(folder, key, rank)
    reasons = {name: skip for name, skip in {**kept, **skipped}.items() if name not in called}
    files.keep(_path_of(folder, key, rank), Skips(reasons), kind="skips-*.json")
    return reasons


def _path_of(folder: Path, key: str, rank: int) -> Path:
    return folder / f"skips-{key[:16]}-{rank}.json"
