"""Capture and replay behind one interface, and the engine for machines without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from vllm_aiter_mla.verify.census import Census
from vllm_aiter_mla.verify.subject import Outputs, Segment
from vllm_aiter_mla.verify.tape import Tape, Watch, recording


class CaptureError(RuntimeError):
    """A segment could not be captured; the message is the driver's or torch's own."""


@dataclass(slots=True)
class Recorded:
    """One captured segment.

    Attributes:
        replay: run it again.
        census: the kernels in it, or None where they cannot be told.
        no_census: why not.
        syncs: host synchronisations met while capturing.
    """

    replay: Callable[[], None]
    census: Census | None
    no_census: str = ""
    syncs: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Captured:
    """A captured step: segments in order, eager ones included, and the outputs, whose addresses do not move."""

    parts: list[Recorded | Callable[[], Outputs]]
    outputs: Outputs

    def replay(self) -> None:
        """One step: every captured segment replayed, every eager one run anew."""
        for part in self.parts:
            if isinstance(part, Recorded):
                part.replay()
            else:
                part()

    @property
    def recorded(self) -> list[Recorded]:
        """The captured segments."""
        return [part for part in self.parts if isinstance(part, Recorded)]


@dataclass(frozen=True, slots=True)
class Probe:
    """What one eager call does besides its result: host synchronisations, and (op, shape, bytes) of its memory."""

    syncs: list[str]
    shapes: list[tuple[str, tuple[int, ...], int]]


class Engine(Protocol):
    """Where graphs are captured and replayed."""

    name: str
    graphs: bool
    device: str

    def capture(self, segments: list[Segment], pool: str, side_stream: bool) -> Captured:
        """Capture a step whose segments have run before. Raises CaptureError."""
        ...

    def probe(self, segments: list[Segment]) -> Probe:
        """Run a step eagerly, once, and watch it. Raises whatever the step raises."""
        ...

    def on_side_stream(self, run: Callable[[], None]) -> None:
        """Run on a stream of its own, ordered after what was enqueued, and wait for it."""
        ...

    def synchronize(self) -> None:
        """Wait for the device."""
        ...

    def allocations(self) -> int | None:
        """How often memory was asked for since the start, or None where nobody counts."""
        ...

    def live_bytes(self) -> int:
        """Bytes held by tensors now."""
        ...

    def unclaimed_bytes(self) -> int:
        """Bytes of the device in use outside torch's books; 0 where nobody knows."""
        ...


def run_eager(segments: list[Segment]) -> Outputs:
    """The same step without any graph."""
    outputs: Outputs = {}
    for segment in segments:
        outputs = segment.run()
    return dict(outputs)


class TapeEngine:
    """Eager replay: the recorded ATen calls again, on the same tensors with the same Python values. Any device."""

    name = "eager replay"
    graphs = False

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._watch = Watch()

    def capture(self, segments: list[Segment], pool: str, side_stream: bool) -> Captured:
        """Record each captured segment on a tape of its own. Pools and streams mean nothing here."""
        parts: list[Recorded | Callable[[], Outputs]] = []
        outputs: Outputs = {}
        for segment in segments:
            if not segment.captured:
                outputs = segment.run()
                parts.append(self._watched(segment.run))
                continue
            with recording() as tape:
                outputs = segment.run()
            parts.append(_recorded(tape))
        return Captured(parts, dict(outputs))

    def probe(self, segments: list[Segment]) -> Probe:
        """Run once under a tape that is thrown away; eager segments may synchronise."""
        syncs: list[str] = []
        shapes: list[tuple[str, tuple[int, ...], int]] = []
        for segment in segments:
            with recording() as tape:
                segment.run()
            if segment.captured:
                syncs += tape.syncs
                shapes += tape.shapes
        return Probe(syncs, shapes)

    def on_side_stream(self, run: Callable[[], None]) -> None:
        """There is one stream only."""
        run()

    def synchronize(self) -> None:
        """Nothing is asynchronous."""

    def allocations(self) -> int | None:
        """A tape cannot tell: repeating a call makes a temporary that a graph would not make."""
        return None

    def live_bytes(self) -> int:
        """Bytes that the eager parts of replays made and that something still holds; a tape itself makes none."""
        return self._watch.live_bytes()

    def _watched(self, run: Callable[[], Outputs]) -> Callable[[], Outputs]:
        def watched() -> Outputs:
            with self._watch:
                return run()

        return watched

    def unclaimed_bytes(self) -> int:
        """Not known of a process's own memory."""
        return 0


def _recorded(tape: Tape) -> Recorded:
    return Recorded(tape.replay, Census.of_names(tape.names()), syncs=list(tape.syncs))
