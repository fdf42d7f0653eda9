# SPDX-License-Identifier: Apache-2.0
"""What the step ``kernels`` finds: a broken oracle, the outcome of a case, the record of a run. Imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from vllm_aiter_mla import files
from vllm_aiter_mla.verify import FAILED, NOTHING, PASSED

GRAPH_ENGINE = "graph capture"
"""Name of the engine that captures graphs on a card, in a record."""
RESULT_STATUSES = ("passed", "failed", "skipped")


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken oracle."""

    oracle: str
    message: str  # what was seen
    step: str = ""  # at which step


@dataclass
class Result:
    """Outcome of a case. It grows while the case runs. Rounds that ended alike are one, see ``joined``."""

    case: str
    variant: str
    backend: str
    engine: str
    seed: int = 0  # of the first round that ended so
    status: str = "passed"  # one of ``RESULT_STATUSES``
    reason: str = ""  # why it was skipped
    findings: list[Finding] = field(default_factory=list)
    rounds: int = 1  # how many ended so
    captures: int = 0  # graphs captured
    replays: int = 0
    checks: int = 0  # steps compared with the reference
    writes_nan: bool = False  # an fp8 overflow became NaN, as the back end says that it may
    launches: dict[str, str] = field(default_factory=dict)  # of each captured size, in words
    digests: dict[str, str] = field(default_factory=dict)  # SHA-256 of each output over all steps; only if asked for
    seconds: float = 0.0
    command: str = ""  # that repeats this case; in a record

    def add(self, findings: list[Finding], step: str) -> None:
        """Note broken oracles."""
        self.findings += [replace(finding, step=step) for finding in findings]
        if findings:
            self.status = "failed"


def joined(results: Iterable[Result]) -> tuple[Result, ...]:
    """Return one result for the rounds in which a case ended alike, so that many rounds make no larger record.

    Numbers are those of all these rounds. Seed, findings, launches, digests and command are those of the first.
    """
    by_end: dict[tuple[str, ...], Result] = {}
    for result in results:
        end = (result.backend, result.variant, result.case, result.status)
        by_end[end] = _with_rounds(by_end[end], result) if end in by_end else result
    return tuple(by_end.values())


def _with_rounds(first: Result, later: Result) -> Result:
    names = ("rounds", "captures", "replays", "checks", "seconds")
    sums = {name: getattr(first, name) + getattr(later, name) for name in names}
    return replace(first, **sums, writes_nan=first.writes_nan or later.writes_nan)


def status_of(results: Iterable[Result]) -> int:
    """Return the exit status of these results."""
    states = {result.status for result in results}
    return FAILED if "failed" in states else PASSED if "passed" in states else NOTHING


@dataclass(frozen=True)
class Verification:
    """What the step ``kernels`` found; ``schemas.json`` says what the fields mean."""

    status: int
    machine: dict[str, str]
    engine: str
    sizes: dict[str, int] | None
    missing: dict[str, str]
    results: tuple[Result, ...]
    emulated: bool = False  # the user says that an emulator stood in the card's place
    evidence: files.Stamp = files.stamp_field("kernels")
