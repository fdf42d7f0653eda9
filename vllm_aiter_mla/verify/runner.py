"""One case with one back end on one engine: build the buffers, capture, take the steps, check."""

from __future__ import annotations

import itertools
import time
import zlib
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.verify import launches, oracles
from vllm_aiter_mla.verify.buffers import Buffers, nan_byte
from vllm_aiter_mla.verify.cases import Case, Eager, Replay, Soak, Step
from vllm_aiter_mla.verify.devices import first_line
from vllm_aiter_mla.verify.engine import Captured, CaptureError, EagerEngine, run_eager
from vllm_aiter_mla.verify.layer import Batch
from vllm_aiter_mla.verify.oracles import Expected, Finding
from vllm_aiter_mla.verify.setting import Geometry, Variant
from vllm_aiter_mla.verify.subject import Outputs, Segment, Subject, build, query_name

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
    """Outcome of a case; the fields are those of the JSON file.

    Attributes:
        case: its name; likewise ``variant``, ``backend``, ``engine``.
        status: "passed", "failed" or "skipped".
        reason: why it was skipped.
        findings: what broke, in order.
        captures: graphs captured.
        replays: replays made.
        checks: steps compared with the reference.
        launches: those of each captured size, in words.
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


def run_case(case: Case, variant: Variant, subject: Subject, engine: EagerEngine, options: Options) -> Result:
    """Run one case; a fault of the subject is a finding, never an exception."""
    result = Result(case.name, variant.name, subject.backend.name, engine.name, options.seed)
    started = time.monotonic()
    # The same numbers whichever cases run beside it.
    seed = zlib.crc32(f"{options.seed}/{case.name}/{variant.name}".encode())
    try:
        with torch.no_grad():
            buffers = Buffers(options.geometry, variant, options.limit, case.layers, case.width, engine.device, seed)
            reason = _declined(case, buffers, subject)
            if reason is not None:
                result.status, result.reason = "skipped", reason
            elif case.kind == "compiled":
                from vllm_aiter_mla.verify import inductor

                result.add(inductor.run(case, buffers, subject, engine), "compiled")
            else:
                _Run(case, buffers, subject, engine, options.soak, result).go()
    except CaptureError as error:
        result.add([Finding("runs", f"the capture failed: {first_line(error)}")], "capture")
    except Exception as error:
        result.add([Finding("runs", f"{type(error).__name__}: {first_line(error)}")], "run")
    result.seconds = time.monotonic() - started
    return result


def _declined(case: Case, buffers: Buffers, subject: Subject) -> str | None:
    """Why the back end does not take one of the case's sizes, or None."""
    for size in case.sizes:
        reason = subject.backend.refuse(buffers.layers[0].inputs(size, case.slots(size)))
        if reason is not None:
            return f"{subject.backend.name} declines T={size}: {reason}"
    return None


class _Run:
    """The state of one case under way."""

    def __init__(
        self, case: Case, buffers: Buffers, subject: Subject, engine: EagerEngine, soak: int, result: Result
    ) -> None:
        self.case, self.buffers, self.subject, self.engine = case, buffers, subject, engine
        self.soak, self.result = soak, result
        self.kind = case.kind if subject.splitting or case.kind != "piecewise" else "full"
        self.captured: dict[int, Captured] = {}
        self.segments: dict[int, list[Segment]] = {}
        # No other case may use the same pool: it is freed with the graphs of its case.
        self.pools = f"run {next(_runs)}"

    def go(self) -> None:
        """Everything, in order, until something breaks."""
        sizes = sorted(self.case.sizes, reverse=True)
        parts = [(f"capture of T={size}", partial(self._capture, size)) for size in sizes]
        parts += [(f"step {i}: {step}", partial(self._step, step)) for i, step in enumerate(self.case.steps, 1)]
        for name, part in parts:
            self.result.add(part(), name)
            if self.result.findings:
                return

    def _build(self, size: int) -> list[Segment]:
        return build(self.kind, self.buffers, self.subject, size, self.case.slots(size))

    def _expected(self, size: int, frozen: bool) -> Expected:
        """``frozen``: a replay. In a graph the op prepares the rows of its capture, else those of the batch."""
        rows = size if frozen and self.case.kind != "piecewise" else self.buffers.batch.rows
        return Expected(self.buffers, self.subject, size, rows, self.case.slots(size), self.case.kind != "kernel")

    def _capture(self, size: int) -> list[Finding]:
        """Warm up, probe, capture; then nothing may have been written, for no row had a slot."""
        self.buffers.before_capture(Batch(0, dummy=True) if self.kind == "piecewise" else Batch(size))
        expected = self._expected(size, frozen=True)
        segments = self._build(size)
        outputs = run_eager(segments)  # the first call of a size compiles its kernels
        self.engine.synchronize()
        found = []
        for segment in segments:
            if segment.captured:
                found += oracles.check_probe(self.engine.probe(segment), self.buffers.geometry.max_position)
            else:
                segment.run()
        if any(finding.oracle == "no-sync" for finding in found):
            return found  # it would end a real capture
        pool = self.pools if self.case.shared_pool else f"{self.pools}, T={size}"
        captured = self.captured[size] = self.engine.capture(segments, pool, self.case.side_stream)
        self.result.captures += len(captured.recorded)
        if syncs := captured.recorded[0].syncs:
            found.append(Finding("no-sync", f"met while capturing: {syncs}"))
        names = captured.recorded[0].launches
        self.result.launches[str(size)] = names if isinstance(names, str) else launches.in_words(names)
        # A back end may have left rows undefined here; only what must be true of a run without slots is checked.
        return found + [f for f in expected.check(outputs) if f.oracle not in _VALUES]

    def _step(self, step: Step) -> list[Finding]:
        if isinstance(step, Replay | Eager):
            return self._run(step)
        if isinstance(step, Soak):
            return self._soak(step)
        if step == "launches":
            return self._launches()
        self.buffers.change(step)
        return []

    def _run(self, step: Replay | Eager) -> list[Finding]:
        """One step with new data, compared with the reference."""
        rows = step.size - self.case.missing_slots if step.rows is None else step.rows
        self.buffers.step(Batch(rows, step.prefill), step.fresh)
        expected = self._expected(step.size, isinstance(step, Replay))
        if isinstance(step, Replay):
            outputs = self._replayed(self.captured[step.size], step.side)
        else:
            if step.size not in self.segments:
                self.segments[step.size] = self._build(step.size)
            outputs = run_eager(self.segments[step.size])
        self.engine.synchronize()
        self.result.checks += 1
        return expected.check(outputs)

    def _replayed(self, captured: Captured, side: bool) -> Outputs:
        """Replay over prepared queries full of NaN: what a replay does not write is seen by whoever reads it."""
        for i in range(len(self.buffers.layers)):
            query = captured.outputs.get(query_name(i))
            if query is not None and query.numel():
                query.view(torch.uint8).fill_(nan_byte(query.dtype))
        if side:
            self.engine.on_side_stream(captured.replay)
        else:
            captured.replay()
        self.result.replays += 1
        return captured.outputs

    def _soak(self, step: Soak) -> list[Finding]:
        """Many replays in ``SOAK_CHECKS`` portions: compare after each; memory must not grow after the first."""
        captured, portion = self.captured[step.size], max(self.soak // SOAK_CHECKS, 1)
        held = (0, 0)
        for check in range(SOAK_CHECKS):
            findings = self._many(captured, portion) + self._run(Replay(step.size))
            if findings:
                return findings
            if check == 0:
                held = self.engine.memory()
        return _growth(held, self.engine.memory(), portion * (SOAK_CHECKS - 1))

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
            names = captured.recorded[0].launches
            if isinstance(names, str):
                self.result.status, self.result.reason = "skipped", names
                continue
            wrong = launches.violation(self.subject.backend.name, names, self.case.layers, self._budget(size))
            if wrong is not None:
                findings.append(Finding("launches", f"T={size}: {wrong}"))
        return findings

    def _budget(self, size: int) -> int | None:
        """Launches of a plain call of the reference at this size, counted in a capture of its own."""
        if self.subject.backend.name != "reference":
            return None
        inputs = self.buffers.layers[0].inputs(size, self.case.slots(size))
        segment = Segment(True, lambda: {query_name(0): reference.prepare(inputs)})
        segment.run()
        found = self.engine.capture([segment], f"{self.pools}, plain, T={size}", False).recorded[0].launches
        return None if isinstance(found, str) else len(found)


_runs = itertools.count()
_VALUES = ("query-nope", "query-rope", "finite")


def _growth(held: tuple[int, int], now: tuple[int, int], replays: int) -> list[Finding]:
    findings = []
    if now[0] > held[0]:
        findings.append(Finding("memory", f"{now[0] - held[0]} bytes more are held after {replays} more replays"))
    if now[1] > held[1] + UNCLAIMED_GROWTH:
        findings.append(Finding("memory", f"{now[1] - held[1]} bytes more are in use outside torch's allocator"))
    return findings
