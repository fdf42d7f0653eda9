# SPDX-License-Identifier: Apache-2.0
"""Why graphs skip layers, kept in a file: a warm start loads the graphs of a cold one, and runs no pass."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import Skip


@dataclass(frozen=True)
class Skips:
    """The reasons of a cold start, for warm ones."""

    skipped: dict[str, Skip]  # by layer
    evidence: files.Stamp = files.stamped("skips")


def keep(
    folder: Path, key: str, rank: int, skipped: Mapping[str, Skip] | None, called: Collection[str] = ()
) -> dict[str, Skip]:
    """Keep why the graphs that this start compiled skip layers, and return what earlier starts have kept.

    A start that compiles some graphs and loads others, as with a draft model, adds its reasons to the kept ones.

    Args:
        folder: where the plugin keeps its files; made if it is missing.
        key: identifies the configuration.
        rank: of this worker.
        skipped: the reasons by layer; None if this start has compiled no graph.
        called: layers whose op was reached, so no graph skips them any more.

    Raises:
        OSError: the file cannot be written, or cannot be read.
        ValueError: the file is too large or holds something else, and this start does not write it again.
    """
    path, kept = folder / f"skips-{key[:16]}-{rank}.json", dict[str, Skip]()
    try:
        kept = files.read_kept(Skips, path).skipped
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        if skipped is None:
            raise
    if skipped is not None:
        still = {name: skip for name, skip in {**kept, **skipped}.items() if name not in called}
        files.keep(path, Skips(still), kind="skips-*.json")
    return kept
