"""Capture and replay, here without a GPU: the recorded ATen calls of a step are repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_aiter_mla.verify.recording import Recording, Watch, recording
from vllm_aiter_mla.verify.subject import Outputs, Segment


class CaptureError(RuntimeError):
    """A segment could not be captured; the message is the driver's or torch's own."""


@dataclass(slots=True)
class Recorded:
    """One captured segment.

    Attributes:
        replay: run it again.
        launches: names of what it launches, or why they cannot be told.
        syncs: host synchronisations met while capturing.
    """

    replay: Callable[[], None]
    launches: tuple[str, ...] | str
    syncs: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Captured:
    """A captured step: what to call in order, the captured segments among it, and its outputs as they are now."""

    calls: list[Callable[[], object]]
    recorded: list[Recorded]
    outputs: Outputs

    def replay(self) -> None:
        """One step: every captured segment replayed, every eager one run anew."""
        for call in self.calls:
            call()


class EagerEngine:
    """Eager replay: the recorded ATen calls again, on the same tensors with the same Python values. Any device.

    ``graphs.GraphEngine`` replaces what a GPU does otherwise.
    """

    name = "eager replay"
    graphs = False
    device = "cpu"

    def __init__(self) -> None:
        self._watch = Watch()

    def capture(self, segments: list[Segment], pool: str, side_stream: bool) -> Captured:
        """Capture a step whose segments have run before, each captured segment by itself. Raises CaptureError.

        Args:
            segments: the step.
            pool: graphs of one pool share its memory.
            side_stream: whether to capture on a stream of its own.
        """
        captured = Captured([], [], {})
        for segment in segments:
            if segment.captured:
                recorded, outputs = self._record(segment, pool, side_stream)
                captured.recorded.append(recorded)
                captured.calls.append(recorded.replay)
            else:
                outputs = segment.run()
                captured.calls.append(self._watched(segment.run))
            captured.outputs = outputs
        return captured

    def _record(self, segment: Segment, pool: str, side_stream: bool) -> tuple[Recorded, Outputs]:
        with recording() as made:
            outputs = segment.run()
        return Recorded(made.replay, tuple(made.names), made.syncs), outputs

    def _watched(self, run: Callable[[], Outputs]) -> Callable[[], object]:
        def watched() -> None:
            with self._watch:
                run()

        return watched

    def probe(self, segment: Segment) -> Recording:
        """Run a segment eagerly, once, and note its host synchronisations and the memory that it makes."""
        with recording() as made:
            segment.run()
        return made

    def on_side_stream(self, run: Callable[[], None]) -> None:
        """Run on a stream of its own, ordered after what was enqueued; a CPU has one only."""
        run()

    def synchronize(self) -> None:
        """Wait for the device; a CPU is never behind."""

    def allocations(self) -> int | None:
        """How often memory was asked for; None here, where a repeated call makes temporaries that no graph makes."""
        return None

    def memory(self) -> tuple[int, int]:
        """Bytes that tensors hold, and bytes of the device in use outside torch's allocator.

        Here: the bytes made by the eager parts of a replay; and 0, because a CPU cannot tell.
        """
        return self._watch.live_bytes(), 0


def run_eager(segments: list[Segment]) -> Outputs:
    """The same step without any graph."""
    outputs: Outputs = {}
    for segment in segments:
        outputs = segment.run()
    return dict(outputs)
