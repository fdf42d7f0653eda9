# SPDX-License-Identifier: Apache-2.0
"""The records of what runs: the status file of a rank, the ranks of an engine as one, and kept reasons to skip.

``schemas.json`` says what the fields mean. Status files carry the name of their server's run, whose lock its front end
holds. Each worker holds a lock of its own, which tells that it outlives its front end. What is wrong with a file is
raised to the caller.
"""

import hashlib
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from vllm_aiter_mla import files

RUN = "AITER_MLA_RUN"
"""Environment variable that names this server's run; the front end sets it and its workers inherit it."""
LOCK = "lock-status-"
"""Start of the name of a run's lock file, which its front end holds, and of those that its workers hold."""

ENGINE = "engine"
"""Entry of ``RankStatus.skipped`` for an engine to which vLLM gives no MLA layer; it counts as no layer."""

Count = Annotated[int, Field(ge=0, lt=2**20)]
"""Of ranks; a file that claims more, or fewer than none, is broken."""
Reason = tuple[str, str]
"""Code and reason of a layer that is left to vLLM."""


@dataclass(frozen=True)
class Timed:
    """What was timed for one layer shape at start-up, and chosen.

    Raises:
        ValueError: nothing was timed, or a count lacks the figure of vLLM's own kernels or of the chosen one.
    """

    shape: str  # in words
    layers: tuple[str, ...]
    chosen: tuple[tuple[int, int, str], ...]  # (first, last, kernel) in tokens
    us: dict[int, dict[str, float]]  # microseconds a layer by token count and candidate, on this rank
    since: str = ""  # when an earlier start took the figures; empty if this one did

    def __post_init__(self) -> None:
        if not self.us or any({"vllm", self.runs(tokens)} - by.keys() for tokens, by in self.us.items()):
            raise ValueError("a figure is missing")

    def runs(self, tokens: int) -> str:
        """Return what runs at ``tokens``; empty beyond what was chosen."""
        return next((kernel for _, last, kernel in self.chosen if tokens <= last), "")


@dataclass(frozen=True)
class Decided:
    """What was decided for layers that are decided alike; ``RankStatus.skipped`` says why one runs none of our kernels.

    The same as ``serving.decision.Decision``, for readers without torch.
    """

    layers: tuple[str, ...]
    kernels: tuple[tuple[int, int, str], ...]  # (first, last, kernel) in tokens; empty: vLLM's own
    passed_over: tuple[tuple[str, str], ...]  # (kernel, reason) of each that runs at no token count


@dataclass(frozen=True)
class RankStatus:
    """What one rank's layers run on: the status file."""

    rank: Count
    integration: str
    card: str
    total: int
    engaged: dict[str, str]
    skipped: dict[str, Reason]
    compiled: dict[str, dict[str, int]]
    measured: tuple[Timed, ...]
    overflows: tuple[str, ...]
    decode_limit: int
    kv_cache_dtype: str
    tuned: dict[str, str] = field(default_factory=dict)
    decided: tuple[Decided, ...] = ()
    capture_sizes: tuple[int, ...] = ()
    full_graphs: tuple[int, ...] = ()
    model_name: str | None = None
    engine: str | None = None
    run: str = ""
    writer: str = ""
    ranks: Count = 0
    evidence: files.Stamp = files.stamped("status")


@dataclass(frozen=True)
class Skips:
    """The reasons of a cold start, for warm ones."""

    skipped: dict[str, Reason]
    evidence: files.Stamp = files.stamped("skips")


@dataclass(frozen=True)
class EngineRecord:
    """The ranks of an engine as one."""

    record: RankStatus  # the first rank's, with the layers of all
    ranks: int
    fallen: dict[int, Reason]  # ranks that skip a layer which another rank engages, with the reason
    silent: int  # ranks without a record

    @property
    def whole(self) -> bool:
        """Whether every rank runs what the others run."""
        return not self.fallen and not self.silent


def of_engine(ranks: Sequence[RankStatus | None]) -> EngineRecord:
    """Return the records of all ranks of an engine as one.

    A layer counts as engaged if a rank runs it on one of our kernels. A rank that skips a layer which another rank
    engages has fallen back, and one without a record is silent; both are named.

    Args:
        ranks: their records; None of a rank that has failed, or has its file elsewhere. At least one is known.
    """
    known = [record for record in ranks if record is not None]
    engaged = {layer: kernel for record in known for layer, kernel in record.engaged.items()}
    skipped = {layer: why for record in known for layer, why in record.skipped.items()}
    fallen = {record.rank: why for record in known for layer, why in record.skipped.items() if layer in engaged}
    left = {layer: why for layer, why in skipped.items() if layer not in engaged}
    record = replace(
        known[0], total=len((engaged | skipped).keys() - {ENGINE}), engaged=engaged, skipped=left,
        # The stages of a pipeline have layers of their own.
        measured=next((one.measured for one in known if one.measured), ()),
        overflows=tuple(dict.fromkeys(name for one in known for name in one.overflows)),
        tuned={layers: tiles for one in reversed(known) for layers, tiles in one.tuned.items()},
    )  # fmt: skip
    return EngineRecord(record, len(ranks), fallen, len(ranks) - len(known))


def with_silent(ranks: Sequence[RankStatus]) -> list[RankStatus | None]:
    """Return the records of an engine's ranks, of which at least one is known, and None for each that has none here."""
    return [*ranks, *[None] * (max(one.ranks for one in ranks) - len(ranks))]


def record_of_skipped_engine(code: str, message: str, layers: Sequence[int], kv_cache_dtype: str) -> RankStatus:
    """Return a record as ``record_of`` does for an engine that was skipped as a whole: its workers run nothing of ours.

    Args:
        code: of the reason.
        message: the reason in one line.
        layers: indices of the model's MLA layers; only the workers know their names.
        kv_cache_dtype: of the engine, as vLLM spells it.
    """
    skipped = dict.fromkeys([f"layer {index}" for index in layers] or [ENGINE], (code, message))
    return RankStatus(
        rank=0, integration="", card="", total=len(layers), engaged={}, skipped=skipped, compiled={}, measured=(),
        overflows=(), decode_limit=0, kv_cache_dtype=kv_cache_dtype, ranks=1,
    )  # fmt: skip


def write(folder: Path, record: RankStatus) -> tuple[Path, RankStatus]:
    """Write the status file of one rank, ``status-RUN-ENGINE-RANK.json``; return its path, and what it holds.

    Removes the files of this machine's servers that have ended.

    Args:
        folder: where the plugin keeps its files; made if it is missing.
        record: of ``record_of`` or ``record_of_skipped_engine``.

    Raises:
        OSError: it cannot be written.
    """
    record = replace(record, run=join_run(folder))
    path = folder / f"{_name_of(record)}.json"
    files.hold(_lock_of_rank(folder, record))
    files.write(path, record)
    for old in folder.glob("status-*-*.json"):
        with suppress(Exception):  # another program's file, or one that is being written: leave it
            known = files.read(RankStatus, old)
            # A lock may mean nothing to another machine that shares the folder.
            ended = lives(folder, known.run) is False and engine_lives(folder, [known]) is False
            if known.evidence.host == record.evidence.host and ended:
                old.unlink(missing_ok=True)
    for lock in folder.glob(f"{LOCK}{host_id()}-*"):
        with suppress(Exception):
            files.is_held(lock, remove=True)
    return path, record


def read_all(folder: Path, run: str, bad: Callable[[str], None]) -> list[RankStatus]:
    """Return the status files in a folder, sorted by name.

    Args:
        folder: where the plugin keeps its files.
        run: of one server, or "*" for all.
        bad: takes one line for each file that cannot be read, or holds something else.
    """
    found = []
    for path in sorted(folder.glob(f"status-{run}-*.json")):
        try:
            found.append(files.read(RankStatus, path))
        except FileNotFoundError:
            continue  # removed since the folder was listed
        except (OSError, ValueError) as error:
            bad(str(error))
    return found


def by_engine(records: Sequence[RankStatus]) -> dict[tuple[str, str, str], list[RankStatus]]:
    """Return the records of the ranks of each engine, by (run, model name, engine).

    Ranks that a larger engine has left behind, which the same process had before, are not among them.
    """
    found: dict[tuple[str, str, str], list[RankStatus]] = {}
    for record in records:
        found.setdefault((record.run, record.model_name or "", record.engine or "0"), []).append(record)
    for name, ranks in found.items():
        first = min(ranks, key=lambda record: record.rank)
        found[name] = [one for one in ranks if not first.ranks or one.rank < first.rank + first.ranks]
    return found


def start_run() -> str:
    """Name this server's run in the environment, unless a parent process has, and return the name."""
    return os.environ.setdefault(RUN, f"{host_id()}-{os.getpid()}-{secrets.token_hex(4)}")


def host_id() -> str:
    """Return what tells the runs of this machine from those of others that share the folder."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def join_run(folder: Path) -> str:
    """Return the name of this server's run; hold its lock to the end of this process, unless another process does.

    The front end comes first, so the lock lives as long as it does. Workers of another machine (Ray) have a folder of
    their own, where the first of them holds it.

    Args:
        folder: where the plugin keeps its files; made if it is missing.

    Raises:
        OSError: the lock cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run = start_run()
    files.hold(_lock_of(folder, run))
    return run


def lives(folder: Path, run: str) -> bool | None:
    """Return whether the front end of a run still lives; None if that cannot be told."""
    return files.is_held(_lock_of(folder, run))


def engine_lives(folder: Path, ranks: Sequence[RankStatus]) -> bool | None:
    """Return whether a process that wrote one of these records still lives; None if that cannot be told."""
    held = [files.is_held(_lock_of_rank(folder, record)) for record in ranks]
    return True if True in held else None if None in held else False


def _lock_of(folder: Path, run: str) -> Path:
    return folder / f"{LOCK}{Path(run).name}"


def _lock_of_rank(folder: Path, record: RankStatus) -> Path:
    return folder / f"lock-{Path(_name_of(record)).name}"


def _name_of(record: RankStatus) -> str:
    return f"status-{record.run}-{record.engine or 0}-{record.rank}"
