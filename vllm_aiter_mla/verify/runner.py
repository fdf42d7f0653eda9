"""One case with one back end on one engine: build the buffers, capture, take the steps, check."""

from __future__ import annotations

import itertools
import time
import zlib
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from vllm_aiter_mla.verify import census, oracles
from vllm_aiter_mla.verify.cases import ALL, Case, Eager, Launches, Replay, Soak, Step
from vllm_aiter_mla.verify.devices import first_line
from vllm_aiter_mla.verify.engines import Captured, CaptureError, TapeEngine, run_eager
from vllm_aiter_mla.verify.oracles import Finding
from vllm_aiter_mla.verify.setting import Geometry, Variant
from vllm_aiter_mla.verify.subject import Outputs, Segment, Subject, build, query_name
from vllm_aiter_mla.verify.world import Batch, World, nan_byte

# How often a long run is compared with the reference.
SOAK_CHECKS = 4
# By how much the memory in use outside torch's allocator may grow: other processes share the device.
UNCLAIMED_GROWTH = 64 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is like, beside its cases.

    Attributes:
        geometry: the layer.
        limit: L, the last capture size.
        seed: of every case's data, together with the case's name.
        soak: replays of a long run.
    """

    geometry: Geometry
    limit: int
    seed: int = 0
    soak: int = 1000


@dataclass
class Result:
    """Outcome of a case.

    Attributes:
        case: its name; likewise ``variant``, ``backend``, ``engine``.
        status: "passed", "failed" or "skipped".
        reason: why it was skipped.
        findings: what broke, in order.
        captures: graphs captured.
        replays: replays made.
        checks: steps compared with the reference.
        launches: the census of each captured size, in words.
        seconds: wall clock.
        seed: the run's seed.
    """

    case: str
    variant: str
    backend: str
    engine: str
    seed: int = 0
    status: str = "passed"
    reason: str = ""
    findings: list[Finding] = field(default_factory=list)
    captures: int = 0
    replays: int = 0
    checks: int = 0
    launches: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, findings: list[Finding], step: str) -> None:
        """Note broken oracles."""
        self.findings += [replace(finding, step=step) for finding in findings]
        if findings:
            self.status = "failed"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def run_case(case: Case, variant: Variant, subject: Subject, engine: TapeEngine, options: Options) -> Result:
    """Run one case; a fault of the subject is a finding, never an exception."""
    result = Result(case.name, variant.name, subject.name, engine.name, options.seed)
    started = time.monotonic()
    try:
        with torch.no_grad():
            if case.kind == "compiled":
                from vllm_aiter_mla.verify import inductor

                world = new_world(case, variant, engine, options)
                result.add(inductor.run(case, world, subject, engine), "compiled")
            else:
                _Run(case, variant, subject, engine, options, result).go()
    except _StopError:
        pass
    except CaptureError as error:
        result.add([Finding("runs", f"the capture failed: {first_line(error)}")], "capture")
    except Exception as error:
        result.add([Finding("runs", f"{type(error).__name__}: {first_line(error)}")], "run")
    result.seconds = time.monotonic() - started
    return result


def new_world(case: Case, variant: Variant, engine: TapeEngine, options: Options) -> World:
    """The buffers of a case: the same numbers whichever cases run beside it."""
    seed = zlib.crc32(f"{options.seed}/{case.name}/{variant.name}".encode())
    return World(options.geometry, variant, options.limit, case.layers, case.width, engine.device, seed)


class _StopError(Exception):
    """The case cannot go on; the result says why."""


class _Run:
    """The state of one case under way."""

    def __init__(
        self, case: Case, variant: Variant, subject: Subject, engine: TapeEngine, options: Options, result: Result
    ) -> None:
        self.case, self.subject, self.engine, self.options, self.result = case, subject, engine, options, result
        self.world = new_world(case, variant, engine, options)
        self.attends = case.kind in ("full", "piecewise")
        self.captured: dict[int, Captured] = {}
        self.segments: dict[int, list[Segment]] = {}
        # No other case may use the same pool: it is freed with the graphs of its case.
        self.pools = f"run {next(_runs)}"

    def go(self) -> None:
        """Everything, in order."""
        for size in self.case.sizes:
            reason = self.subject.refuse(self.world.inputs(self.world.layers[0], size, self._slots(size)))
            if reason is not None:
                self.result.status, self.result.reason = "skipped", f"{self.subject.name} declines T={size}: {reason}"
                return
        for size in sorted(self.case.sizes, reverse=True):
            self._capture(size)
        for number, step in enumerate(self.case.steps, 1):
            self._note(self._step(step), f"step {number}: {step}")

    def _note(self, findings: list[Finding], step: str) -> None:
        self.result.add(findings, step)
        if findings:
            raise _StopError

    def _slots(self, size: int) -> int | None:
        return size - self.case.missing_slots if self.case.missing_slots else None

    def _program(self, size: int) -> list[Segment]:
        if size not in self.segments:
            self.segments[size] = build(self.case.kind, self.world, self.subject, size, self._slots(size))
        return self.segments[size]

    def _capture(self, size: int) -> None:
        """Warm up, probe, capture; then nothing may have been written, for no row had a slot."""
        batch = {"kernel": Batch(1), "full": Batch(size), "piecewise": Batch(1, dummy=True)}[self.case.kind]
        self.world.before_capture(size, batch)
        before = oracles.prepare(self.world, self.subject, size, self._slots(size), attends=False)
        segments = build(self.case.kind, self.world, self.subject, size, self._slots(size))
        outputs = run_eager(segments)  # compiles and loads whatever the first call of a size compiles and loads
        self.engine.synchronize()
        found = oracles.check_probe(self.engine.probe(segments), self.options.geometry.max_position)
        if any(finding.oracle == "no-sync" for finding in found):
            self._note(found, f"before the capture of T={size}")
        pool = self.pools if self.case.shared_pool else f"{self.pools}, T={size}"
        captured = self.captured[size] = self.engine.capture(segments, pool, self.case.side_stream)
        self.result.captures += len(captured.recorded)
        first = captured.recorded[0]
        if first.syncs:
            found.append(Finding("no-sync", f"met while capturing: {first.syncs}"))
        self.result.launches[str(size)] = first.census.text() if first.census else first.no_census
        # A back end may have left rows undefined here; only what must be true of a run without slots is checked.
        found += [f for f in oracles.check(self.world, self.subject, before, outputs) if f.oracle not in _VALUES]
        self._note(found, f"capture of T={size}")

    def _step(self, step: Step) -> list[Finding]:
        if isinstance(step, Replay | Eager):
            return self._run(step)
        if isinstance(step, Soak):
            return self._soak(step)
        if isinstance(step, Launches):
            return self._launches()
        self.world.change(step.what)
        return []

    def _run(self, step: Replay | Eager) -> list[Finding]:
        """One step with new data, compared with the reference."""
        rows = step.size - self.case.missing_slots if step.rows is None else step.rows
        self.world.step(step.size, Batch(rows, step.prefill), step.fresh if isinstance(step, Replay) else ALL)
        before = oracles.prepare(self.world, self.subject, step.size, self._slots(step.size), self.attends)
        if isinstance(step, Eager):
            outputs = run_eager(self._program(step.size))
        else:
            outputs = self._replayed(self.captured[step.size], step.side)
        self.engine.synchronize()
        self.result.checks += 1
        return oracles.check(self.world, self.subject, before, outputs)

    def _replayed(self, captured: Captured, side: bool) -> Outputs:
        """Replay over prepared queries full of NaN: what a replay does not write is seen by whoever reads it."""
        for i in range(len(self.world.layers)):
            query = captured.outputs[query_name(i)]
            if query.numel():
                query.view(torch.uint8).fill_(nan_byte(query.dtype))
        if side:
            self.engine.on_side_stream(captured.replay)
        else:
            captured.replay()
        self.result.replays += 1
        return captured.outputs

    def _soak(self, step: Soak) -> list[Finding]:
        """Many replays in ``SOAK_CHECKS`` portions: compare after each; memory must not grow after the first."""
        captured, portion = self.captured[step.size], max(self.options.soak // SOAK_CHECKS, 1)
        held = (0, 0)
        for check in range(SOAK_CHECKS):
            findings = self._many(captured, portion) + self._run(Replay(step.size))
            if findings:
                return findings
            if check == 0:
                held = self._memory()
        return _growth(held, self._memory(), portion * (SOAK_CHECKS - 1))

    def _memory(self) -> tuple[int, int]:
        return self.engine.live_bytes(), self.engine.unclaimed_bytes()

    def _many(self, captured: Captured, times: int) -> list[Finding]:
        """Replay ``times`` times; where nothing eager lies between the graphs, nobody may ask for memory."""
        asked = self.engine.allocations()
        for _ in range(times):
            captured.replay()
        self.engine.synchronize()
        self.result.replays += times
        again = self.engine.allocations()
        if len(captured.calls) > len(captured.recorded) or asked is None or again is None or again == asked:
            return []
        return [Finding("memory", f"{times} replays asked {again - asked} times for memory")]

    def _launches(self) -> list[Finding]:
        findings = []
        for size, captured in self.captured.items():
            found = captured.recorded[0]
            if found.census is None:
                self.result.status, self.result.reason = "skipped", found.no_census
                continue
            wrong = census.violation(self.subject.name, found.census, self.case.layers, self._budget(size))
            if wrong is not None:
                findings.append(Finding("launches", f"T={size}: {wrong}"))
        return findings

    def _budget(self, size: int) -> int | None:
        """Launches of the subject's plain call at this size, counted in a capture of its own."""
        plain = self.subject.plain
        if plain is None:
            return None
        inputs = self.world.inputs(self.world.layers[0], size, self._slots(size))
        segment = Segment(True, lambda: {query_name(0): plain(inputs)})
        segment.run()
        found = self.engine.capture([segment], f"{self.pools}, plain, T={size}", False).recorded[0].census
        return None if found is None else found.launches


_runs = itertools.count()
_VALUES = ("query-nope", "query-rope", "finite")


def _growth(held: tuple[int, int], now: tuple[int, int], replays: int) -> list[Finding]:
    findings = []
    if now[0] > held[0]:
        findings.append(Finding("memory", f"{now[0] - held[0]} bytes more are held after {replays} more replays"))
    if now[1] > held[1] + UNCLAIMED_GROWTH:
        findings.append(Finding("memory", f"{now[1] - held[1]} bytes more are in use outside torch's allocator"))
    return findings
