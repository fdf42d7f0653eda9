# SPDX-License-Identifier: Apache-2.0
"""One case with one back end on one engine: build the buffers, capture, take the steps, check each."""

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from vllm_aiter_mla.kernels import reference
from vllm_aiter_mla.kernels.backend import KernelBackend
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import with_guards
from vllm_aiter_mla.verify import launches, layer, oracles
from vllm_aiter_mla.verify.cases import CaseStep, Eager, Item, Replay
from vllm_aiter_mla.verify.engine import EagerEngine
from vllm_aiter_mla.verify.layer import Batch, Buffers
from vllm_aiter_mla.verify.oracles import Expected
from vllm_aiter_mla.verify.results import Finding, Result

# How often a long run is compared with the reference.
SOAK_CHECKS = 4
# Allowed growth of the memory in use outside torch's allocator: other processes share the device.
UNCLAIMED_GROWTH = 64 << 20
# What prepared queries hold before a replay, so that whoever reads a row that was not written shows it.
POISON = torch.nan


def run_case(item: Item, backend: KernelBackend, engine: EagerEngine) -> Result:
    """Run one case. A fault of the back end is a finding, never an exception."""
    result = Result(item.case.name, item.variant.name, item.backend, engine.name, item.seed)
    at, started = "preparation", time.monotonic()
    try:
        with torch.no_grad():
            for at, part in _Run(item, Buffers(item, engine.device), backend, engine, result).parts():
                result.add(part(), at)
                if result.findings:
                    break
    except Exception as error:
        result.add([Finding("runs", f"{type(error).__name__}: {launches.first_line(error)}")], at)
    result.seconds = time.monotonic() - started
    return result


@dataclass
class _Run:
    """The state of one running case."""

    item: Item
    buffers: Buffers
    backend: KernelBackend
    engine: EagerEngine
    result: Result
    captured: dict[int, layer.ModelStep] = field(default_factory=dict)  # by padded size
    digests: dict[str, Any] = field(default_factory=dict)  # of each output, so far
    # Two cases never share a pool: it is freed with the graphs of its case.
    number: int = field(default_factory=itertools.count().__next__)

    def parts(self) -> Iterator[tuple[str, Callable[[], list[Finding]]]]:
        """Yield the capture of every size, then every step, with its name; nothing if a row count is declined."""
        for rows in sorted(self.item.case.row_counts, reverse=True):
            if (reason := self.backend.refuse(self.buffers.layers[0].inputs(rows))) is not None:
                self.result.status, self.result.reason = "skipped", f"{self.backend.name} declines T={rows}: {reason}"
                return
        sizes = sorted(self.item.case.sizes, reverse=True)
        yield from ((f"capture of T={size}", partial(self._capture, size)) for size in sizes)
        for i, step in enumerate(self.item.case.steps, 1):
            yield f"step {i}: {step}", partial(self._step, step)

    def _expected(self, size: int, frozen: bool) -> Expected:
        """Inside a graph (``frozen``) the op prepares the rows of its capture, else those of the batch."""
        rows = size if frozen and self.item.case.kind != "piecewise" else self.buffers.batch.rows
        return Expected(self.buffers, self.backend, size, rows)

    def _capture(self, size: int) -> list[Finding]:
        """Warm up, probe, capture. No row has a slot yet, so nothing may be written."""
        self.buffers.before_capture(Batch(0, dummy=True) if self.item.case.kind == "piecewise" else Batch(size))
        expected = self._expected(size, frozen=True)
        step = layer.build(self.buffers, self.backend, size)
        step.run()  # the first call of a size compiles its kernels
        outputs = dict(step.outputs)
        card().synchronize()
        findings = []
        for segment in step.segments:
            if segment.captured:
                findings += oracles.check_probe(self.engine.probe(segment), self.buffers.geometry.max_position)
            else:
                segment.run()
        if any(finding.oracle == "no-sync" for finding in findings):
            return findings  # it would end a real capture
        pool = f"run {self.number}" + f", T={size}" * (not self.item.case.shared_pool)
        captured = self.captured[size] = self.engine.capture(step, pool, self.item.case.side_stream)
        self.result.captures += len(captured.graphs)
        names = captured.graphs[0].launches
        self.result.launches[str(size)] = names if isinstance(names, str) else launches.in_words(names)
        return findings + expected.check(outputs)

    def _step(self, step: CaseStep) -> list[Finding]:
        if isinstance(step, Replay):
            return self._run(step)
        if step == "soak":
            return self._soak()
        if step == "launches":
            return self._launches()
        self.buffers.change(step)
        return []

    def _run(self, step: Replay, times: int = 1) -> list[Finding]:
        """Take one step with new data, ``times`` times, and compare what that leaves with the reference.

        If nothing eager runs between graphs, no replay may ask for memory.
        """
        eager = isinstance(step, Eager)
        self.buffers.step(Batch(step.real_rows, step.prefill), step.fresh)
        expected = self._expected(step.size, not eager)
        taken = layer.build(self.buffers, self.backend, step.size) if eager else self.captured[step.size]
        poisoned = {key: tensor for key, tensor in taken.outputs.items() if key[0] == "query"}
        for tensor in poisoned.values():
            with_guards(tensor).fill_(POISON)
        run = partial(card().on_side_stream, taken.run) if step.side and self.engine.graphs else taken.run
        before = card().allocations()
        for _ in range(times):
            run()
        card().synchronize()
        allocations = card().allocations() - before
        self.result.replays += times * (not eager)
        self.result.checks += 1
        findings = expected.check(taken.outputs)
        for key, tensor in poisoned.items():
            if taken.outputs.get(key) is tensor:  # what runs outside of graphs makes another one
                findings += oracles.check_guards(tensor)
        if allocations and not eager and len(taken.segments) == len(taken.graphs):
            findings.append(Finding("memory", f"{times} replay(s) asked {allocations} times for memory"))
        if self.item.digest:
            self._digest(taken.outputs, step.real_rows)
        self.result.writes_nan |= expected.writes_nan
        return findings

    def _digest(self, outputs: layer.Outputs, rows: int) -> None:
        """Add the real rows of each output, and each layer's cache, to their digests."""
        seen = [(f"{what} {number}", tensor[:rows]) for (what, number), tensor in outputs.items()]
        seen += [(f"cache {number}", own.storage) for number, own in enumerate(self.buffers.layers)]
        for name, tensor in seen:
            running = self.digests.setdefault(name, hashlib.sha256())
            running.update(layer.raw(tensor.contiguous()).cpu().numpy().tobytes())
            self.result.digests[name] = running.hexdigest()

    def _soak(self) -> list[Finding]:
        """Replay very often in ``SOAK_CHECKS`` portions; compare after each. Memory may grow in the first one only."""
        (size,) = self.captured
        portion, held = max(self.item.soak // SOAK_CHECKS, 1), (0, 0)
        for check in range(SOAK_CHECKS):
            if findings := self._run(Replay(size), portion):
                return findings
            if check == 0:
                held = self.engine.memory()
        tensors, others = (now - before for now, before in zip(self.engine.memory(), held, strict=True))
        if tensors > 0:
            more = portion * (SOAK_CHECKS - 1)
            findings.append(Finding("memory", f"{tensors} bytes more are held after {more} more replays"))
        if others > UNCLAIMED_GROWTH:
            findings.append(Finding("memory", f"{others} bytes more are in use outside torch's allocator"))
        return findings

    def _launches(self) -> list[Finding]:
        """Compare the captured launches with what the back end may launch."""
        findings = []
        for size, captured in self.captured.items():
            names = captured.graphs[0].launches
            if isinstance(names, str):
                self.result.status, self.result.reason = "skipped", names
                continue
            wrong = launches.violation(self.backend.name, names, self.item.case.layers, self._budget(size))
            if wrong is not None:
                findings.append(Finding("launches", f"T={size}: {wrong}"))
        return findings

    def _budget(self, size: int) -> int | None:
        """Count the launches of a plain call of the reference at this size, in a capture of its own."""
        if self.backend.name != "reference":
            return None
        inputs = self.buffers.layers[0].inputs(size)
        plain = layer.ModelStep([layer.Segment(True, lambda: reference.prepare(inputs))], {})
        plain.run()
        names = self.engine.capture(plain, f"run {self.number}, plain, T={size}", False).graphs[0].launches
        return None if isinstance(names, str) else len(names)
