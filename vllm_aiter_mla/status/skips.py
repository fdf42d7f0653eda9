# SPDX-License-Identifier: Apache-2.0
"""Why graphs leave layers out, kept in a file: a warm start loads the graphs of a cold one, and runs no pass."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_aiter_mla import files
from vllm_aiter_mla.status.record import Reason


@dataclass(frozen=True)
class Skips:
    """The reasons of a cold start, for warm ones."""

    skipped: dict[str, Reason]
    evidence: files.Stamp = files.stamped("skips")


def keep(
    folder: Path, key: str, rank: int, skipped: Mapping[str, Reason] | None, called: Collection[str] = ()
) -> dict[str, Reason]:
    """Keep why the graphs of a cold start left layers out, for the warm starts that load them; return what was kept.

    A start that compiles some graphs and loads others, as with a draft model, adds its own reasons to those.

    Args:
        folder: where the plugin keeps its files; made if it is missing.
        key: identifies the configuration.
        rank: of this worker.
        skipped: the reasons by layer; None if this start has compiled no graph.
        called: layers whose op was reached: no graph leaves them out any more.

    Raises:
        OSError: the file cannot be written, or cannot be read.
        ValueError: it is too large or holds something else; not if this start writes it again.
    """
    path, kept = folder / f"skips-{key[:16]}-{rank}.json", dict[str, Reason]()
    try:
        kept = files.read_kept(Skips, path).skipped
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        if skipped is None:
            raise
    if skipped is not None:
        left_out = {name: why for name, why in {**kept, **skipped}.items() if name not in called}
        files.keep(path, Skips(left_out), kind="skips-*.json")
    return kept
