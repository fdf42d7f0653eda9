"""A whole run: which cases, with which back ends, on what machine, and the outcome."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch

from vllm_aiter_mla.kernels import measure
from vllm_aiter_mla.kernels.platform import detect_platform
from vllm_aiter_mla.verify import backends
from vllm_aiter_mla.verify.cases import REAL, SMALL, Case, Geometry, Variant, cases, variants
from vllm_aiter_mla.verify.engine import EagerEngine, GraphEngine
from vllm_aiter_mla.verify.runner import Options, Result, run_case

NO_GRAPHS = "graph capture: not available on this machine"
PASSED, FAILED, NOTHING = 0, 1, 3
# On a GPU L of vLLM's default server, which reaches both of AITER's kernels. The others are no powers of two, so that L
# itself is another capture size.
CPU_LIMIT, GPU_LIMIT, INTERPRETED_LIMIT = 12, 1024, 9
CPU_REPLAYS, GPU_REPLAYS, QUICK_REPLAYS, INTERPRETED_REPLAYS = 1000, 5000, 100, 8
# The cases need eight tokens. 8,192 is vLLM's default on MI300X with seven drafts: 1,024 requests of eight tokens.
LIMITS = (8, 8192)


class NotHereError(RuntimeError):
    """The device or the back end that was asked for is not on this machine; the message is one line for the user."""


class NoSuchError(ValueError):
    """A case, variant or back end does not exist, or a limit is out of range; the message says what there is."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for. An empty tuple means all; None means the machine's default."""

    backend: tuple[str, ...] = ()
    only: tuple[str, ...] = ()  # case names, or parts of them
    variant: tuple[str, ...] = ()
    seed: int = 0  # of the first round
    repeat: int = 1  # rounds, each with the next seed
    quick: bool = False  # fewer variants and cases, and short long runs
    limit: int | None = None  # L, the last capture size
    replays: int | None = None  # of a long run
    device: str | None = None  # "gpu" or "cpu"; None: a GPU if there is one
    geometry: Geometry | None = None  # sizes of a layer; None: small ones on a CPU, DeepSeek's on a GPU
    weight: str | None = None  # format of the absorb weight in every variant; None: as each variant has it
    again: tuple[str, ...] = ()  # options that the command which repeats a failure needs too


@dataclass(frozen=True, slots=True)
class Item:
    """One result to come: a case with a variant and a back end."""

    backend: str
    case: Case
    variant: Variant
    options: Options
    here: bool  # or else in a process that interprets Triton

    def run(self, engine: EagerEngine) -> Result:
        """Run it with a new back end, because state kept by one case could change the next."""
        if not self.here:
            return backends.run_interpreted(self.case, self.variant, self.options)
        return run_case(self.case, self.variant, backends.load(self.backend), engine, self.options)


class Session:
    """A run and its outcome. Raises NoSuchError and NotHereError."""

    def __init__(self, request: Request) -> None:
        self.request, self.engine, self.machine = request, engine_here(request.device), machine()
        self.items, self.missing = plan(request, self.engine)  # what to run, in order; back ends that are not here
        self.results: list[Result] = []  # of the items that have run

    def run(self) -> Iterator[Result]:
        """Run it all; yield each result as it comes."""
        for item in self.items:
            self.results.append(item.run(self.engine))
            yield self.results[-1]

    @property
    def status(self) -> int:
        """Exit status: 0 all passed, 1 something failed, 3 nothing could be run."""
        states = {result.status for result in self.results}
        if "failed" in states:
            return FAILED
        return PASSED if "passed" in states else NOTHING

    def as_dict(self) -> dict[str, Any]:
        """Return the record for the JSON file."""
        return {
            "status": self.status,
            "machine": self.machine,
            "engine": self.engine.name,
            "sizes": asdict(self.items[0].options.geometry) if self.items else None,
            "missing": self.missing,
            "results": [asdict(r) | {"command": command(r, self.request)} for r in self.results],
        }


def engine_here(device: str | None = None) -> EagerEngine:
    """Return the engine for this machine: real graphs on a GPU, eager replay elsewhere.

    Eager replay sets torch to one thread. Its tensors are tiny, and with more threads it took more than twice as long
    on two shared cores.

    Args:
        device: "gpu", "cpu", or None for what is here.

    Raises:
        NotHereError: a GPU was asked for, and torch sees none.
    """
    if torch.cuda.is_available() and device != "cpu":
        return GraphEngine()
    if device == "gpu":
        raise NotHereError(f"torch {torch.__version__} sees no GPU; --device cpu runs the same cases as eager replay")
    torch.set_num_threads(1)
    return EagerEngine()


def machine() -> dict[str, str]:
    """Return the card and the versions, for every figure to name."""
    if torch.cuda.is_available():
        return measure.machine() | {"arch": detect_platform().arch}
    return {"torch": str(torch.__version__), "python": platform.python_version(), "card": "none (CPU)"}


def plan(request: Request, engine: EagerEngine) -> tuple[list[Item], dict[str, str]]:
    """Return what to run, and the missing back ends with the reason. Raises NoSuchError and NotHereError."""
    low, high = LIMITS
    if request.limit is not None and not low <= request.limit <= high:
        raise NoSuchError(f"--limit {request.limit}: between {low} and {high} tokens expected")
    _chosen(request.only, [case.name for case in cases(low)], "case", part=True)
    found = {name: backends.find(name) for name in _chosen(request.backend, list(backends.FINDERS), "back end")}
    missing = {name: reason for name, reason in found.items() if isinstance(reason, str)}
    if request.device == "gpu" and set(request.backend) & set(missing):
        raise NotHereError("; ".join(f"back end {name}: {reason}" for name, reason in missing.items()))
    here = {name: backend is not None for name, backend in found.items() if name not in missing}
    seeds = range(request.seed, request.seed + request.repeat)
    return [
        item for seed in seeds for name in here for item in _items(request, engine, name, here[name], seed)
    ], missing


def _items(request: Request, engine: EagerEngine, name: str, here: bool, seed: int) -> Iterator[Item]:
    """Yield one back end's items of one round."""
    limit, replays = (GPU_LIMIT, GPU_REPLAYS) if engine.graphs else (CPU_LIMIT, CPU_REPLAYS)
    if not here:
        limit, replays = INTERPRETED_LIMIT, INTERPRETED_REPLAYS
    elif request.quick:
        replays = QUICK_REPLAYS
    geometry = request.geometry or (REAL if engine.graphs else SMALL)
    options = Options(geometry, request.limit or limit, seed, request.replays or replays)
    # A case or variant that is asked for by name runs, however long it takes.
    short = request.quick or not here
    every = cases(options.limit)
    wanted = _chosen(request.only, [case.name for case in every], "case", part=True)
    selected = [case for case in every if case.name in wanted and (request.only or case.quick or not short)]
    fp8 = detect_platform().fp8
    kinds = variants(engine.device, fp8, quick=short and not request.variant)
    if request.weight is not None:
        weight = {"bf16": ("plain",), "fp8": ("fp8", fp8), "mxfp4": ("mxfp4",)}[request.weight]
        kinds = tuple(replace(kind, weight=weight) for kind in kinds if kind.name != "fp8-weight")
    chosen = _chosen(request.variant, [kind.name for kind in kinds], "variant")
    for variant, case in product((kind for kind in kinds if kind.name in chosen), selected):
        yield Item(name, case, variant, options, here)


def _chosen(asked: tuple[str, ...], known: list[str], what: str, part: bool = False) -> list[str]:
    """Return the names that were asked for, all by default; ``part`` lets a text select every name that holds it."""
    chosen = set() if asked else set(known)
    for text in asked:
        found = {text} & set(known) or {name for name in known if part and text in name}
        if not found:
            raise NoSuchError(f"no {what} called {text!r}; there are {', '.join(known)}")
        chosen |= found
    return [name for name in known if name in chosen]


def command(result: Result, request: Request) -> str:
    """Return the command that runs only this case, with the same data."""
    parts = ["vllm-aiter-mla verify", f"--backend {result.backend}", f"--only {result.case}"]
    parts += [f"--variant {result.variant}", f"--seed {result.seed}"]
    if request.limit is not None:
        parts.append(f"--limit {request.limit}")
    if request.replays is not None:
        parts.append(f"--replays {request.replays}")
    elif request.quick:
        parts.append("--quick")
    parts += request.again
    return " ".join(parts)
