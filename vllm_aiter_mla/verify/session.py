# SPDX-License-Identifier: Apache-2.0
"""A whole run: which cases, with which back ends, on what machine, and the outcome."""

import platform
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch

from vllm_aiter_mla.kernels import stopwatch
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.platform import detect_platform
from vllm_aiter_mla.serving.backends import AITER_KERNELS, Backends
from vllm_aiter_mla.settings import Settings
from vllm_aiter_mla.verify.cases import ACT, LIMITS, REAL, SMALL, TINY, Case, Geometry, Item, Variant, cases, variants
from vllm_aiter_mla.verify.engine import EagerEngine, GraphEngine
from vllm_aiter_mla.verify.results import Result, Verification, joined, status_of
from vllm_aiter_mla.verify.runner import run_case

# What runs where nothing else is asked for: a layer, the last capture size, and replays of a long run. 1024 is vLLM's
# default and reaches both of AITER's kernels; 12, no power of two, is a capture size of its own.
SIZES = {"cpu": (SMALL, 12, 1000), "gpu": (REAL, 1024, 5000), "emulator": (TINY, LIMITS[0], 4)}
QUICK_REPLAYS = 100


class NotHereError(RuntimeError):
    """The device that was asked for is not on this machine; the message is one line for the user."""


FINDERS: dict[str, Callable[[], KernelBackend | str]] = {
    name: lambda name=name: Backends(Settings(), detect_platform()).get(name)  # type: ignore[misc]
    for name in ("reference", "triton", *AITER_KERNELS)
}
"""How to make each back end, or learn why there is none, in the order in which they run; add your own."""


def find(name: str) -> KernelBackend | str:
    """Return a new back end, or why there is none: an error, if looking for it raises."""
    try:
        return FINDERS[name]()
    except Exception as error:  # importing a vendor's package may do anything
        return f"{type(error).__name__}: {error}"


def run(item: Item, engine: EagerEngine) -> Result:
    """Run an item with a new back end, because state kept by one case could change the next."""
    backend = find(item.backend)
    assert not isinstance(backend, str), f"{item.backend}: {backend}"
    return run_case(item, backend, engine)


@dataclass
class Session:
    """What the user asked for, and its outcome. An empty tuple means all; None means the machine's default.

    Raises:
        ValueError: a case, variant or back end does not exist (the message says what does), or the limit is wrong.
        NotHereError: the GPU that was asked for is not here.
    """

    backend: tuple[str, ...] = ()
    case: tuple[str, ...] = ()  # their names, or parts of them
    variant: tuple[str, ...] = ()
    seed: int = 0  # of the first round
    repeat: int = 1  # rounds, each with the next seed
    quick: bool = False  # fewer variants and cases, and short long runs
    limit: int | None = None  # the last capture size
    replays: int | None = None  # of a long run
    device: str | None = None  # "gpu" or "cpu"; None: a GPU if there is one
    geometry: Geometry | None = None  # sizes of a layer; None: small ones on a CPU, DeepSeek's on a GPU
    weight: tuple[Any, ...] | None = None  # format of the absorb weight in every variant; None: as each variant has it
    act: torch.dtype = ACT  # activation dtype, bfloat16 or float16
    model: str = ""  # MODEL of the command that repeats a failure, from which it takes the sizes
    again: tuple[str, ...] = ()  # words that this command needs too
    small: bool = False  # the quick cases at sizes that an emulator finishes, with a digest of each output
    emulated: bool = False  # the user says that the card is an emulator's
    results: list[Result] = field(default_factory=list)  # of the items that have run

    def __post_init__(self) -> None:
        self.engine = engine_here(self.device)
        on_card = self.engine.graphs
        geometry, limit, replays = SIZES["emulator" if self.small else "gpu" if on_card else "cpu"]
        geometry, limit = self.geometry or geometry, limit if self.limit is None else self.limit
        replays = self.replays or (min(replays, QUICK_REPLAYS) if self.quick else replays)
        quick = self.quick or self.small
        selected = select(self.backend, self.case, self.variant, limit, quick, on_card, self.weight, self.act)
        backends = {name: find(name) for name in selected.backends}
        self.missing = {name: why for name, why in backends.items() if isinstance(why, str)}
        self.items = [
            Item(name, case, variant, geometry, limit, seed, replays, self.small)
            for seed in range(self.seed, self.seed + self.repeat)
            for name in backends if name not in self.missing
            for variant in selected.variants
            for case in selected.cases
        ]  # fmt: skip

    def run(self) -> Iterator[Result]:
        """Run it all; yield each result as it comes."""
        for item in self.items:
            yield self.run_one(item)

    def run_one(self, item: Item) -> Result:
        """Run one item, note its result and return it with the command that repeats it."""
        result = run(item, self.engine)
        self.results.append(replace(result, command=self.command(result)))
        return self.results[-1]

    @property
    def status(self) -> int:
        """Exit status: 0 all passed, 1 something failed, 3 nothing could be run."""
        return status_of(self.results)

    @property
    def machine(self) -> dict[str, str]:
        """The card and the versions, for every figure to name."""
        if card().is_there():
            return stopwatch.machine() | {"arch": detect_platform().arch}
        return {"torch": str(torch.__version__), "python": platform.python_version(), "card": "none (CPU)"}

    def record(self) -> Verification:
        """Return the record of the run."""
        return Verification(
            status=self.status,
            machine=self.machine,
            engine=self.engine.name,
            sizes=asdict(self.items[0].geometry) if self.items else None,
            missing=self.missing,
            results=joined(self.results),
            emulated=self.emulated,
        )

    def command(self, result: Result) -> str:
        """Return the command that runs only this case, with the same data."""
        return shlex.join((
            "vllm-aiter-mla", "check", *([self.model] if self.model else []), "--only", "kernels",
            "--backend", result.backend, "--case", result.case, "--variant", result.variant,
            "--data-seed", str(result.seed), *self.again,
        ))  # fmt: skip


def engine_here(device: str | None = None) -> EagerEngine:
    """Return the engine for this machine: real graphs on a GPU, eager replay elsewhere or if ``device`` is "cpu".

    Eager replay sets torch to one thread: its tensors are tiny, and two threads took more than twice as long.

    Raises:
        NotHereError: ``device`` is "gpu", and torch sees none.
    """
    if card().is_there() and device != "cpu":
        return GraphEngine()
    if device == "gpu":
        raise NotHereError(f"torch {torch.__version__} sees no GPU; --device cpu runs the same cases as eager replay")
    torch.set_num_threads(1)
    return EagerEngine()


class Selection(NamedTuple):
    """What runs: each case in each variant with each back end."""

    backends: list[str]
    cases: list[Case]
    variants: list[Variant]


def select(
    backend: tuple[str, ...], case: tuple[str, ...], variant: tuple[str, ...], limit: int, quick: bool, on_card: bool,
    weight: tuple[Any, ...] | None = None, act: torch.dtype = ACT,
) -> Selection:  # fmt: skip
    """Return what these fields of a ``Session`` select, and look at no device.

    Raises:
        ValueError: a case, variant or back end does not exist, or the limit is wrong; names option and value.
    """
    # A case or variant that is asked for by name runs, however long it takes.
    known = [each for each in cases(limit, act) if case or each.quick or not quick]
    kinds = variants(on_card, detect_platform().fp8, quick and not variant, act)
    if weight is not None:
        kinds = tuple(
            kind if kind.weight[0] == weight[0] else replace(kind, weight=weight)  # a plain weight keeps its layout
            for kind in kinds if kind.name != "fp8-weight"
        )  # fmt: skip
    case_names = chosen(case, [each.name for each in known], "--case", part=True)
    variant_names = chosen(variant, [kind.name for kind in kinds], "--variant")
    return Selection(
        chosen(backend, list(FINDERS), "--backend"),
        [each for each in known if each.name in case_names],
        [kind for kind in kinds if kind.name in variant_names],
    )


def chosen(asked: tuple[str, ...], known: list[str], option: str, part: bool = False) -> list[str]:
    """Return the names that were asked for, all by default; ``part`` lets a text select every name that holds it.

    Raises:
        ValueError: one is not known; names ``option``.
    """
    wanted = set() if asked else set(known)
    for text in asked:
        matches = {text} & set(known) or {name for name in known if part and text in name}
        if not matches:
            raise ValueError(f"{option} {text}: no such name; there are {', '.join(known)}")
        wanted |= matches
    return [name for name in known if name in wanted]
