"""A whole run: which cases, with which back ends, on what; and what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch

from vllm_aiter_mla.verify import backends, devices, interpreted
from vllm_aiter_mla.verify.cases import Case, cases
from vllm_aiter_mla.verify.engine import EagerEngine
from vllm_aiter_mla.verify.oracles import Finding
from vllm_aiter_mla.verify.runner import Options, Result, run_case
from vllm_aiter_mla.verify.setting import REAL, SMALL, Variant, variants

NO_GRAPHS = "graph capture: not available on this machine"
PASSED, FAILED, NOTHING = 0, 1, 2
# Neither is a power of two: L itself is a capture size of its own.
CPU_LIMIT, GPU_LIMIT, INTERPRETED_LIMIT = 12, 96, 9
CPU_REPLAYS, GPU_REPLAYS, QUICK_REPLAYS = 1000, 5000, 100
# The cases need eight tokens; 1,024 requests of eight tokens each are vLLM's default on MI300X with seven drafts.
LIMITS = (8, 8192)


class NoSuchError(ValueError):
    """A case, variant or back end that does not exist, or a limit out of range; the message says what there is."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for; None is the machine's default.

    Attributes:
        backend: names of back ends, empty for all.
        only: case names, or parts of them; empty for all.
        variant: names of variants, empty for all.
        seed: of the first round.
        repeat: rounds, each with the next seed.
        quick: fewer variants and cases, and short long runs.
        limit: L, the last capture size.
        replays: of a long run.
    """

    backend: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    variant: tuple[str, ...] = ()
    seed: int = 0
    repeat: int = 1
    quick: bool = False
    limit: int | None = None
    replays: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One back end's part of a run: its cases times its variants, here or in a process that interprets Triton."""

    backend: str
    here: bool
    cases: tuple[Case, ...]
    variants: tuple[Variant, ...]
    options: Options


class Session:
    """A run and its outcome. Raises NoSuchError.

    Attributes:
        request: what was asked for.
        engine: how graphs are replayed.
        machine: card and versions.
        jobs: of one round.
        missing: back ends that are not here, and why.
        results: one per case, variant, back end and round, as far as they have come.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.engine, self.machine = request, engine_here(), devices.machine()
        self.jobs, self.missing = plan(request, self.engine)
        self.results: list[Result] = []

    @property
    def total(self) -> int:
        """How many results will come."""
        return sum(len(job.cases) * len(job.variants) for job in self.jobs) * self.request.repeat

    def run(self) -> Iterator[Result]:
        """Run it all; yields each result as it comes."""
        for seed in range(self.request.seed, self.request.seed + self.request.repeat):
            for job in self.jobs:
                for result in run_job(replace(job, options=replace(job.options, seed=seed)), self.engine):
                    self.results.append(result)
                    yield result

    @property
    def status(self) -> int:
        """Exit status: 0 all passed, 1 something failed, 2 nothing could be run."""
        states = {result.status for result in self.results}
        if "failed" in states:
            return FAILED
        return PASSED if "passed" in states else NOTHING

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "status": self.status,
            "machine": self.machine,
            "engine": self.engine.name,
            "missing": self.missing,
            "results": [asdict(r) | {"command": command(r, self.request)} for r in self.results],
        }


def engine_here() -> EagerEngine:
    """Real graphs where there is a GPU, eager replay elsewhere.

    Eager replay sets torch to one thread: its tensors are tiny, and threads that wait for one another took more than
    twice as long on two shared cores.
    """
    if torch.cuda.is_available():
        from vllm_aiter_mla.verify.graphs import GraphEngine

        return GraphEngine()
    torch.set_num_threads(1)
    return EagerEngine()


def native_fp8() -> torch.dtype:
    """The card's fp8 type; e4m3fn on a CPU."""
    from vllm_aiter_mla.kernels.platform import detect_platform

    return detect_platform().fp8


def plan(request: Request, engine: EagerEngine) -> tuple[list[Job], dict[str, str]]:
    """The jobs of one round, and the back ends that are missing with the reason. Raises NoSuchError."""
    low, high = LIMITS
    if request.limit is not None and not low <= request.limit <= high:
        raise NoSuchError(f"--limit {request.limit}: between {low} and {high} tokens expected")
    _chosen(request.only, [case.name for case in cases(low)], "case", part=True)
    found = {name: backends.find(name) for name in _chosen(request.backend, list(backends.FINDERS), "back end")}
    missing = {name: reason for name, reason in found.items() if isinstance(reason, str)}
    jobs = [_job(request, engine, name, each is not None) for name, each in found.items() if name not in missing]
    return jobs, missing


def _job(request: Request, engine: EagerEngine, name: str, here: bool) -> Job:
    limit, replays = (GPU_LIMIT, GPU_REPLAYS) if engine.graphs else (CPU_LIMIT, CPU_REPLAYS)
    if not here:
        limit, replays = INTERPRETED_LIMIT, interpreted.SOAK
    elif request.quick:
        replays = QUICK_REPLAYS
    geometry = REAL if engine.graphs else SMALL
    options = Options(geometry, request.limit or limit, request.seed, request.replays or replays)
    every = cases(options.limit)
    names = _chosen(request.only, [case.name for case in every], "case", part=True)
    # A case or variant asked for by name is run, however long it takes.
    short = request.quick or not here
    wanted = tuple(case for case in every if case.name in names and (request.only or case.quick or not short))
    kinds = variants(engine.device, native_fp8(), quick=short and not request.variant)
    chosen = _chosen(request.variant, [kind.name for kind in kinds], "variant")
    return Job(name, here, wanted, tuple(kind for kind in kinds if kind.name in chosen), options)


def _chosen(asked: tuple[str, ...], known: list[str], what: str, part: bool = False) -> list[str]:
    """The names that were asked for, all where none was; ``part`` lets a piece stand for every name that holds it."""
    chosen = set() if asked else set(known)
    for text in asked:
        found = {text} & set(known) or {name for name in known if part and text in name}
        if not found:
            raise NoSuchError(f"no {what} called {text!r}; there are {', '.join(known)}")
        chosen |= found
    return [name for name in known if name in chosen]


def run_job(job: Job, engine: EagerEngine) -> Iterator[Result]:
    """The results of one back end's cases as they come; ``engine`` runs those that run in this process."""
    if job.here:
        for variant, case in product(job.variants, job.cases):
            # A new back end for each case, because state kept by one case could change the next.
            yield run_case(case, variant, backends.load(job.backend), engine, job.options)
        return
    try:
        yield from interpreted.run(job.cases, job.variants, job.options)
    except BrokenProcessPool as error:
        broken = Result(job.cases[0].name, job.variants[0].name, job.backend, interpreted.ENGINE, job.options.seed)
        broken.add([Finding("runs", f"the interpreting process ended: {devices.first_line(error)}")], "start")
        yield broken


def command(result: Result, request: Request) -> str:
    """The one command that runs this case alone, with the same data."""
    parts = ["vllm-aiter-mla verify", f"--backend {result.backend}", f"--only {result.case}"]
    parts += [f"--variant {result.variant}", f"--seed {result.seed}"]
    if request.limit is not None:
        parts.append(f"--limit {request.limit}")
    if request.replays is not None:
        parts.append(f"--replays {request.replays}")
    elif request.quick:
        parts.append("--quick")
    return " ".join(parts)
