"""The rehearsal card: the seam to the device on a CPU, so that an operator's day runs as real processes.

Tensors stay on the CPU. A capture records what reaches the dispatcher, and a replay runs it again. Time comes from a
scenario's table by kernel and token count, and its clock counts nothing else. A launch of our Triton kernel computes by
the reference, and each AITER GEMM and each kernel that Inductor compiled is one launch. Each process that finds
``VARIABLE`` in its environment has the card: see ``rehearsal_path/sitecustomize.py``. A rehearsal says nothing about a
real card.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.sandbox import interpreter
from tests.sandbox.simulated_aiter import gemm, gemm_fp4
from vllm_aiter_mla.kernels import device, formats, reference
from vllm_aiter_mla.kernels.absorb import AbsorbWeight
from vllm_aiter_mla.kernels.device import Device
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.kernels.triton.tiles import Tile
from vllm_aiter_mla.verify.engine import Recording

VARIABLE = "AITER_MLA_SANDBOX_CARD"
"""Environment variable: a ``Scenario`` as JSON."""
KERNELS = {"fused_qk_rope_concat_and_cache_mla": ("aiter", 6), "concat_and_cache_mla_rope_fused": ("vllm", 6)}
"""By the op that tells a kernel: the kernel, and which argument has a row for each token. Other ops cost nothing."""
BODIES = ("vllm", "vllm_aiter_mla")
"""Namespaces whose ops are Python: they launch nothing themselves. vLLM calls them one by one between its pieces."""
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


@dataclass(frozen=True)
class Scenario:
    """What the card is, and how long each kernel takes on it."""

    arch: str = "gfx942"
    name: str = "AMD Instinct MI300X"
    rocm: str | None = "7.0.51831-rehearsal"
    # By kernel, or "triton" and a tile: microseconds of a launch from so many tokens on, ascending
    us: dict[str, list[tuple[int, float]]] = field(
        default_factory=lambda: {"vllm": [(1, 10.0)], "aiter": [(1, 8.0)], "triton": [(1, 5.0)]}
    )
    noise: float = 0.002  # standard deviation of a launch's time, as a share
    rank_us: dict[int, float] = field(default_factory=dict)  # by rank: a factor on every time
    in_use_gib: Sequence[float] = ()  # by card, of its 192, by other processes; cards beyond the last are idle
    fault: str = ""  # "module:function", called at the start of each process


def rank() -> int:
    """Return this process's rank; 0 before there are ranks."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if ready else 0


def label_of(named: dict[str, Any]) -> str:
    """Return the label of the tile of a launch, from its constants."""
    return Tile(named["BLOCK_T"], named["BLOCK_L"], named["num_warps"], blocks=named["BLOCKS"]).label


class Launches(Recording):
    """A recording that enters the ops of ``BODIES``, and also notes which kernels ran, and at how many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and note it, or what it calls if it launches nothing itself."""
        if func.namespace in BODIES:
            with self:
                return func.redispatch(CPU, *args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def add(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any, *others: Any) -> None:
        """Add a call, and note its kernel; that of a launch of our Triton kernel with its tile."""
        kernel, argument = KERNELS.get(name.rpartition(".")[2], ("", 0))
        if kernel:
            self.kernels.append((kernel, args[argument].shape[0]))
        elif name == "decode_prep_kernel":
            self.kernels.append((f"triton {label_of(kwargs)}", args[0]))
        super().add(name, run, args, kwargs, *others)


class Graph:
    """Behaves as ``CUDAGraph(keep_graph=True)``: no replay before it is instantiated."""

    def __init__(self, card: RehearsalCard, made: Launches) -> None:
        self.card, self.made, self.ready = card, made, False

    def instantiate(self) -> None:
        self.ready = True

    def replay(self) -> None:
        assert self.ready
        self.card.replayed += self.made.names
        self.made.replay()


class Timed:
    """What ``record`` returns: a replay that is only timed, so that it need not run."""

    def __init__(self, kernels: list[tuple[str, int]]) -> None:
        self.kernels = kernels

    def __call__(self) -> None:
        """Take no time: ``time_us`` does."""


class RehearsalCard(Device):
    """Answers every question of ``Device`` without torch.cuda, and notes what was asked."""

    torch_device = "cpu"
    rocm: Any = None
    arch: Any = ""

    @property
    def built_for(self) -> str:
        return f"ROCm {self.rocm}" if self.rocm else "CUDA 13.0"

    def __init__(self, scenario: Scenario | None = None) -> None:
        self.scenario = scenario or Scenario()
        self.arch, self.rocm = self.scenario.arch, self.scenario.rocm
        self.capturing, self.checks_syncs = False, False
        self.replayed: list[str] = []
        self.captures: list[tuple[Any, bool]] = []  # pool and side stream of each
        self.recorded, self.sync_checks, self.side_streams, self.given_back = 0, 0, 0, 0
        self.seconds, self.draw = 0.0, random.Random(self.arch)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> RehearsalCard:
        """Let the package run on this card during a test: one assignment."""
        monkeypatch.setattr(device, "installed", self)
        return self

    def is_there(self) -> bool:
        return True

    def count(self) -> int:
        return 8

    def name(self) -> str:
        return self.scenario.name

    def now(self) -> float:
        return self.seconds

    def units(self) -> int:
        return 304

    def cache_bytes(self) -> int:
        return 4096

    def current(self) -> torch.device:
        return torch.device("cpu")

    def memory(self) -> tuple[int, int]:
        return 5, 1

    def in_use(self, cards: int) -> list[tuple[int, int]]:
        given = (*self.scenario.in_use_gib, *[0.0] * self.count())
        return [(int(gib * (1 << 30)), 192 << 30) for gib in given[: min(cards, self.count())]]

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
        if isinstance(run, Timed):
            kernels = run.kernels
        else:
            with Launches() as made:
                run()
            kernels = made.kernels
        us = sum(self.cost(*launch) for launch in kernels)
        self.seconds += us / 1e6
        return us

    def cost(self, kernel: str, tokens: int) -> float:
        """Return the microseconds of one launch, with noise."""
        table = self.scenario.us.get(kernel) or self.scenario.us[kernel.partition(" ")[0]]
        us = [us for first, us in table if tokens >= first][-1]
        return us * self.scenario.rank_us.get(rank(), 1.0) * max(self.draw.gauss(1.0, self.scenario.noise), 0.1)

    def is_capturing(self) -> bool:
        return self.capturing

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        self.recorded += 1
        return Timed(self._recorded(run).kernels)

    def new_pool(self) -> Any:
        return object()

    def capture(self, run: Callable[[], object], pool: Any, side_stream: bool) -> Any:
        self.captures.append((pool, side_stream))
        return Graph(self, self._recorded(run))

    def _recorded(self, run: Callable[[], object]) -> Launches:
        self.capturing = True
        try:
            with Launches() as made:
                run()
        finally:
            self.capturing = False
        return made

    def dot(self, graph: Any) -> str | None:
        nodes = "".join(
            f'"graph_0_node_{i}"[style="bold" shape="octagon" label="{i}\n{name}\n"];\n'
            for i, name in enumerate(graph.made.names)
        )
        return f"digraph dot {{\n{nodes}}}\n"

    def count_kernels(self) -> Callable[[], int]:
        made = Launches()
        made.__enter__()

        def stop() -> int:
            made.__exit__(None, None, None)
            return len(made.names)

        return stop


class TritonLaunch:
    """The Triton kernel as this card runs it: the reference, over the operands of the launch."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.run

    @staticmethod
    def run(
        tokens: int, q: torch.Tensor, weight: torch.Tensor, weight_scale: Any, q_scale: torch.Tensor,
        *others: Any, N: int, M: int, IS_NEOX: bool, **tile: Any,  # noqa: N803
    ) -> None:  # fmt: skip
        """Take what ``launcher.Launch`` gives the kernel: tensors with their strides, and constants by name."""
        out, positions, table, k_pe, kv_c, slot_mapping, k_scale, cache = (
            one for one in others if isinstance(one, torch.Tensor)
        )
        kind = "mxfp4" if weight.dtype == torch.uint8 else "fp8" if formats.is_fp8(weight.dtype) else "plain"
        values = weight if kind == "plain" else weight.transpose(1, 2)
        inputs = DecodeInputs(
            q=q, k_pe=k_pe, kv_c=kv_c, weight=AbsorbWeight(kind, values, weight_scale), kv_cache=cache,
            slot_mapping=slot_mapping, positions=positions, cos_sin_cache=table, k_scale=k_scale, q_scale=q_scale,
            is_neox=IS_NEOX, out_dtype=out.dtype, out_heads=M if M != N else 0,
        )  # fmt: skip
        out.copy_(reference.prepare(inputs, reference.TRITON))


def count_compiled_kernels() -> None:
    """On a rehearsal card, let each C++ kernel that Inductor makes count as the one launch that it would be."""
    if not isinstance(device.installed, RehearsalCard):
        return
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import LambdaFuture

    inner = AsyncCompile.cpp_pybinding

    def cpp_pybinding(self: Any, *given: Any, **named: Any) -> Any:
        found = inner(self, *given, **named)
        if isinstance(found, LambdaFuture):
            return LambdaFuture(lambda: interpreter.one_launch("compiled", found.result()))
        return interpreter.one_launch("compiled", found)

    AsyncCompile.cpp_pybinding = cpp_pybinding


def install_from_environment() -> None:
    """Let this process run on the card that the environment names, if it names one."""
    if VARIABLE not in os.environ:
        return
    given = json.loads(os.environ[VARIABLE])
    given["rank_us"] = {int(rank): factor for rank, factor in given.get("rank_us", {}).items()}
    card = device.installed = RehearsalCard(Scenario(**given))
    from vllm_aiter_mla.kernels.triton import launcher

    launcher.decode_prep_kernel = interpreter.Recorded(TritonLaunch())
    for module in (gemm, gemm_fp4):
        module.batched_gemm = interpreter.one_launch("batched_gemm", module.batched_gemm)
    if card.scenario.fault:
        module, _, function = card.scenario.fault.partition(":")
        getattr(importlib.import_module(module), function)()
