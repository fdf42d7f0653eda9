"""A card on a CPU: a capture records what reaches the dispatcher, a replay runs it again, each launch takes a time."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vllm_aiter_mla.kernels import device
from vllm_aiter_mla.kernels.device import Device
from vllm_aiter_mla.verify.engine import Recording


class Graph:
    """Behaves as ``CUDAGraph(keep_graph=True)``: no replay before it is instantiated."""

    def __init__(self, card: "RecordedCard", made: Recording) -> None:
        self.card, self.made, self.ready = card, made, False

    def instantiate(self) -> None:
        self.ready = True

    def replay(self) -> None:
        assert self.ready
        self.card.replayed += self.made.names
        self.made.replay()


class RecordedCard(Device):
    """Answers every question of ``Device`` without torch.cuda, and notes what was asked.

    Args:
        us: microseconds of a launch, by the call's name.
    """

    torch_device = "cpu"
    rocm: Any = None
    built_for = "CUDA 13.0"
    arch: Any = "sm90"

    def __init__(self, us: Callable[[str], float] = lambda name: 1.0) -> None:
        self.us, self.capturing, self.checks_syncs = us, False, False
        self.replayed: list[str] = []
        self.captures: list[tuple[Any, bool]] = []  # pool and side stream of each
        self.sync_checks, self.side_streams, self.given_back = 0, 0, 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "RecordedCard":
        """Let the package run on this card: one assignment."""
        monkeypatch.setattr(device, "installed", self)
        return self

    def is_there(self) -> bool:
        return True

    def name(self) -> str:
        return "a recorded card"

    def units(self) -> int:
        return 304

    def cache_bytes(self) -> int:
        return 4096

    def current(self) -> torch.device:
        return torch.device("cpu")

    def memory(self) -> tuple[int, int]:
        return 5, 1

    def allocations(self) -> int:
        return 0

    def give_back(self) -> None:
        self.given_back += 1

    def fork_rng(self) -> Any:
        return torch.random.fork_rng(devices=[])

    def synchronize(self) -> None:
        pass

    def on_side_stream(self, run: Callable[[], None]) -> None:
        self.side_streams += 1
        run()

    @contextlib.contextmanager
    def syncs_raise(self) -> Iterator[None]:
        self.checks_syncs, self.sync_checks = True, self.sync_checks + 1
        try:
            yield
        finally:
            self.checks_syncs = False

    def time_us(self, run: Callable[[], object]) -> float:
        return sum(map(self.us, self._launches(run)))

    def _launches(self, run: Callable[[], object]) -> list[str]:
        self.replayed = []
        with Recording() as made:
            run()
        return self.replayed or made.names

    def is_capturing(self) -> bool:
        return self.capturing

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        graph = self.capture(run, None, True)
        graph.instantiate()
        return graph.replay  # type: ignore[no-any-return]

    def new_pool(self) -> Any:
        return object()

    def capture(self, run: Callable[[], object], pool: Any, side_stream: bool) -> Any:
        self.captures.append((pool, side_stream))
        self.capturing = True
        try:
            with Recording() as made:
                run()
        finally:
            self.capturing = False
        return Graph(self, made)

    def dot(self, graph: Any) -> str | None:
        nodes = "".join(
            f'"graph_0_node_{i}"[style="bold" shape="octagon" label="{i}\n{name}\n"];\n'
            for i, name in enumerate(graph.made.names)
        )
        return f"digraph dot {{\n{nodes}}}\n"

    def count_kernels(self) -> Callable[[], int]:
        made = Recording()
        made.__enter__()

        def stop() -> int:
            made.__exit__(None, None, None)
            return len(made.names)

        return stop
