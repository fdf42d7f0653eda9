"""A whole run: which cases, with which back ends, on what machine, and the outcome."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from vllm_aiter_mla.kernels import measure
from vllm_aiter_mla.kernels.platform import detect_platform
from vllm_aiter_mla.verify import FAILED, NOTHING, PASSED, backends
from vllm_aiter_mla.verify.cases import LIMITS, REAL, SMALL, Geometry, Item, cases, variants
from vllm_aiter_mla.verify.engine import EagerEngine, GraphEngine
from vllm_aiter_mla.verify.runner import Result

# On a GPU L of vLLM's default server, which reaches both of AITER's kernels. The other is no power of two, so that L
# itself is another capture size.
CPU_LIMIT, GPU_LIMIT = 12, 1024
CPU_REPLAYS, GPU_REPLAYS, QUICK_REPLAYS = 1000, 5000, 100


class NotHereError(RuntimeError):
    """The device or the back end that was asked for is not on this machine; the message is one line for the user."""


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
    weight: tuple[Any, ...] | None = None  # format of the absorb weight in every variant; None: as each variant has it
    again: tuple[str, ...] = ()  # options that the command which repeats a failure needs too


class Session:
    """A run and its outcome.

    Raises:
        ValueError: a case, variant or back end does not exist, or the limit is out of range; the message says what
            there is.
        NotHereError: the GPU or the back end that was asked for is not here.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.engine = request, engine_here(request.device)
        limit = LIMITS[0] if request.limit is None else request.limit
        _chosen(request.only, [case.name for case in cases(limit)], "case", part=True)
        names = _chosen(request.backend, list(backends.FINDERS), "back end")
        found = {name: backends.find(name) for name in names}
        self.missing = {name: reason for name, reason in found.items() if isinstance(reason, str)}
        if request.device == "gpu" and set(request.backend) & set(self.missing):
            raise NotHereError("; ".join(f"back end {name}: {reason}" for name, reason in self.missing.items()))
        rounds = range(request.seed, request.seed + request.repeat)
        here = [name for name in names if name not in self.missing]
        self.items = [item for seed in rounds for name in here for item in self._items(name, seed)]
        self.results: list[Result] = []  # of the items that have run

    def _items(self, name: str, seed: int) -> Iterator[Item]:
        """Yield one back end's items of one round, variant by variant."""
        request, graphs, fp8 = self.request, self.engine.graphs, detect_platform().fp8
        limit, replays = (GPU_LIMIT, GPU_REPLAYS) if graphs else (CPU_LIMIT, CPU_REPLAYS)
        if request.quick:
            replays = QUICK_REPLAYS
        limit, replays = request.limit or limit, request.replays or replays
        # A case or variant that is asked for by name runs, however long it takes.
        every = [case for case in cases(limit) if request.only or case.quick or not request.quick]
        wanted = _chosen(request.only, [case.name for case in every], "case", part=True)
        kinds = variants(self.engine.device, fp8, quick=request.quick and not request.variant)
        if request.weight is not None:
            kinds = tuple(replace(kind, weight=request.weight) for kind in kinds if kind.name != "fp8-weight")
        chosen = _chosen(request.variant, [kind.name for kind in kinds], "variant")
        geometry = request.geometry or (REAL if graphs else SMALL)
        for variant in (kind for kind in kinds if kind.name in chosen):
            for case in (case for case in every if case.name in wanted):
                yield Item(name, case, variant, geometry, limit, seed, replays)

    def run(self) -> Iterator[Result]:
        """Run it all; yield each result as it comes."""
        for item in self.items:
            self.results.append(backends.run(item, self.engine))
            yield self.results[-1]

    @property
    def status(self) -> int:
        """Exit status: 0 all passed, 1 something failed, 3 nothing could be run."""
        states = {result.status for result in self.results}
        if "failed" in states:
            return FAILED
        return PASSED if "passed" in states else NOTHING

    @property
    def machine(self) -> dict[str, str]:
        """The card and the versions, for every figure to name."""
        if torch.cuda.is_available():
            return measure.machine() | {"arch": detect_platform().arch}
        return {"torch": str(torch.__version__), "python": platform.python_version(), "card": "none (CPU)"}

    def as_dict(self) -> dict[str, Any]:
        """Return the record for the JSON file."""
        return {
            "status": self.status,
            "machine": self.machine,
            "engine": self.engine.name,
            "sizes": asdict(self.items[0].geometry) if self.items else None,
            "missing": self.missing,
            "results": [asdict(result) | {"command": self.command(result)} for result in self.results],
        }

    def command(self, result: Result) -> str:
        """Return the command that runs only this case, with the same data."""
        request = self.request
        parts = ["vllm-aiter-mla verify", f"--backend {result.backend}", f"--only {result.case}"]
        parts += [f"--variant {result.variant}", f"--seed {result.seed}"]
        if request.limit is not None:
            parts.append(f"--limit {request.limit}")
        if request.replays is not None:
            parts.append(f"--replays {request.replays}")
        elif request.quick:
            parts.append("--quick")
        return " ".join((*parts, *request.again))


def engine_here(device: str | None = None) -> EagerEngine:
    """Return the engine for this machine: real graphs on a GPU, eager replay elsewhere or if ``device`` is "cpu".

    Eager replay sets torch to one thread. Its tensors are tiny, and with more threads it took more than twice as long
    on two shared cores.

    Raises:
        NotHereError: ``device`` is "gpu", and torch sees none.
    """
    if torch.cuda.is_available() and device != "cpu":
        return GraphEngine()
    if device == "gpu":
        raise NotHereError(f"torch {torch.__version__} sees no GPU; --device cpu runs the same cases as eager replay")
    torch.set_num_threads(1)
    return EagerEngine()


def _chosen(asked: tuple[str, ...], known: list[str], what: str, part: bool = False) -> list[str]:
    """Return the names that were asked for, all by default; ``part`` lets a text select every name that holds it."""
    chosen = set() if asked else set(known)
    for text in asked:
        found = {text} & set(known) or {name for name in known if part and text in name}
        if not found:
            raise ValueError(f"no {what} called {text!r}; there are {', '.join(known)}")
        chosen |= found
    return [name for name in known if name in chosen]
