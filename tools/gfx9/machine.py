"""From a kernel's instructions to a launch: instructions become closures once, waves run them, barriers join waves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tools.gfx9 import access, matrix, scalar, vector
from tools.gfx9.code import Code
from tools.gfx9.lds import Lds
from tools.gfx9.memory import Memory
from tools.gfx9.operand import Operands, signed
from tools.gfx9.parse import Fault, Instruction
from tools.gfx9.wave import LGKM, VMEM, Run, Wave

BARRIER = "s_barrier"
END = "s_endpgm"
ENDS = (BARRIER, END, *scalar.BRANCHES)
COUNTER = re.compile(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)")


def bind(i: Instruction, accum_offset: int = 0) -> Run:
    """What one instruction does to a wave; where a branch leads, barriers and the end are the caller's.

    Raises:
        Skipped: something of the instruction is not modelled.
    """
    ops = Operands(i, accum_offset)
    if i.encoding in ("sdwa", "dpp") and i.name not in vector.VOP:
        raise i.refuse(f"{i.encoding.upper()} is not modelled here")
    for table, binder in BINDERS:
        if i.name in table if isinstance(table, dict) else table.match(i.name):
            return binder(i, ops)
    raise i.refuse("the instruction is not modelled")


def _bind_scalar(i: Instruction, ops: Operands) -> Run:
    types, function = scalar.SOP[i.name]
    i.only()
    target, *kinds = types.split()
    names = list(i.operands)
    if kinds[0] == "d":
        names.insert(1, names[0])
    written = None if target == "-" else ops.write(names.pop(0), f"s.{target}")
    if len(names) != len(kinds):
        raise i.refuse(f"{len(kinds)} sources expected")
    kinds = [target if kind == "d" else kind for kind in kinds]
    reads = [_short(i, n) if kind == "k" else ops.read(n, f"s.{kind}") for n, kind in zip(names, kinds, strict=True)]
    condition = scalar.scc if i.name in scalar.READS_SCC else (lambda w: None)

    def run(w: Wave) -> None:
        result, scc = function(*[read(w) for read in reads], condition(w))
        if written is not None:
            written(w, result)
        if scc is not None:
            w.scc = scc

    return run


def _short(i: Instruction, text: str) -> Callable[[Wave], int]:
    value = int(text, 0)
    if not -(1 << 15) <= value < 1 << 16:
        raise i.refuse(f"{text}: 16 bits expected")
    return lambda w: signed(value & 0xFFFF, 16)


def _bind_saveexec(i: Instruction, ops: Operands) -> Run:
    ops.count(2)
    i.only()
    function = scalar.SAVEEXEC[i.name]
    target, read = ops.reg(0, "s", 2), ops.read(i.operands[1], "s.u64")

    def run(w: Wave) -> None:
        old = w.exec
        new = function(read(w), old) & ((1 << 64) - 1)
        w.set_scalar64(target, old)
        w.set_exec(new)
        w.scc = int(new != 0)

    return run


def _bind_wait(i: Instruction, ops: Operands) -> Run:
    i.only()
    found = COUNTER.findall(i.operands[0])
    if not found or COUNTER.sub("", i.operands[0]).strip(" &") or any(name == "expcnt" for name, _ in found):
        raise i.refuse("the wait is not modelled")
    waits = [(VMEM if name == "vmcnt" else LGKM, int(count)) for name, count in found]

    def run(w: Wave) -> None:
        for counter, count in waits:
            w.wait(counter, count)

    return run


def _bind_setreg(i: Instruction, ops: Operands) -> Run:
    if i.operands[0] != "hwreg(HW_REG_MODE, 23, 1)" or i.operands[1] not in ("0", "1"):
        raise i.refuse("only bit 23 of MODE, FP16_OVFL, is modelled")
    return lambda w: setattr(w, "saturate", i.operands[1] == "1")


def _nothing(i: Instruction, ops: Operands) -> Run:
    i.only()
    return lambda w: None


BINDERS: tuple[tuple[Any, Callable[[Instruction, Operands], Run]], ...] = (
    (vector.VOP, vector.bind_vop),
    (vector.SPECIAL, lambda i, ops: vector.SPECIAL[i.name](i, ops)),
    (scalar.SOP, _bind_scalar),
    (scalar.SAVEEXEC, _bind_saveexec),
    (re.compile(r"v_mfma_"), matrix.bind_mfma),
    (re.compile(r"s_load_dword(x\d+)?$"), access.bind_scalar_load),
    (re.compile(r"(buffer|global)_"), access.bind_vector),
    (re.compile(r"ds_"), access.bind_lds),
    (re.compile(r"s_waitcnt$"), _bind_wait),
    (re.compile(r"s_setreg_imm32_b32$"), _bind_setreg),
    (dict.fromkeys(("s_nop", *ENDS)), _nothing),
)


class Program:
    """A kernel whose instructions are bound; binding refuses what is not modelled, wherever it stands.

    ``runs`` counts how often a wave of the last launch executed each instruction.
    """

    def __init__(self, code: Code) -> None:
        self.code, self.instructions = code, code.listing.instructions
        if self.instructions[-1].name not in ENDS:
            raise self.instructions[-1].refuse("the code runs on past its last instruction")
        self.steps = [bind(i, code.accum_offset) for i in self.instructions]
        self.targets = [self._target(i) for i in self.instructions]
        self.runs = [0] * len(self.steps)

    def _target(self, i: Instruction) -> int:
        if i.name not in scalar.BRANCHES:
            return 0
        if i.operands[0] not in self.code.listing.labels:
            raise i.refuse("no such label")
        return self.code.listing.labels[i.operands[0]]

    def run(self, wave: Wave, start: int) -> Iterator[int]:
        """Run one wave; yields the index of each barrier at which it waits."""
        at = start
        while True:
            i = self.instructions[at]
            self.runs[at] += 1
            try:
                self.steps[at](wave)
                taken = i.name in scalar.BRANCHES and scalar.BRANCHES[i.name](wave)
            except Fault as fault:
                raise Fault(f"line {i.line}: {i.text}: {fault}") from None
            if i.name == END:
                return
            if i.name == BARRIER:
                yield at
            at = self.targets[at] if taken else at + 1


@dataclass
class Group:
    """What the waves of one workgroup share."""

    memory: Memory
    lds: Lds


@dataclass
class Counts:
    """What a launch did, over all its waves; ``trips`` are the most of one wave, to memory and to the arguments."""

    waves: int = 0
    trips: tuple[int, int] = (0, 0)
    instructions: Counter[str] = field(default_factory=Counter)


def launch(
    program: Program, memory: Memory, kernarg: bytes, groups: Iterable[int], waves: int, lds_bytes: int,
    preload: bool = True,
) -> Counts:  # fmt: skip
    """Run the workgroups ``groups`` of a one-dimensional grid, one after another.

    Each one has ``waves`` waves and ``lds_bytes`` of dynamic LDS. ``kernarg``, the argument block, is added to the
    buffers of ``memory``. With ``preload`` the firmware loads arguments into SGPRs and enters past the code that does
    it for firmware that cannot.

    Raises:
        Fault: with the line of the instruction and the workgroup.
    """
    raw = np.frombuffer(kernarg, np.uint8)
    block = memory.add("arguments", raw, readable=True)
    counts = Counts()
    program.runs = [0] * len(program.steps)
    with np.errstate(all="ignore"):
        for index in groups:
            group = Group(memory, Lds(lds_bytes))
            words = raw.view(np.uint32) if preload else None
            started = [_wave(program, group, k, index, block.start, words) for k in range(waves)]
            _run_group(program, started, index)
            counts.waves += waves
            memory_trips, argument_trips = zip(counts.trips, *[wave.stored for wave in started], strict=True)
            counts.trips = (max(memory_trips), max(argument_trips))
    for i, runs in zip(program.instructions, program.runs, strict=True):
        counts.instructions[i.name] += runs
    return counts


def _wave(program: Program, group: Group, number: int, index: int, kernarg: int, words: Any) -> Wave:
    """A wave as the dispatch leaves it: argument pointer, preloaded arguments, workgroup index, thread index."""
    code = program.code
    wave = Wave(number, code.vgprs, group, code.arch)
    wave.set_scalar64(0, kernarg)
    for k in range(code.preloaded if words is not None else 0):
        wave.set_scalar(2 + k, int(words[k]))
    wave.set_scalar(code.user_sgprs, index)
    wave.put(wave.u, 0, np.arange(64, dtype=np.uint32) + np.uint32(64 * number))
    wave.start = code.listing.preloaded_entry if words is not None else 0
    return wave


def _run_group(program: Program, waves: Sequence[Wave], index: int) -> None:
    """Waves run in turn from barrier to barrier; the LDS knows which of their accesses could have met."""
    running = [program.run(wave, wave.start) for wave in waves]
    try:
        while True:
            stops = [next(run, None) for run in running]
            if all(stop is None for stop in stops):
                return
            if len(set(stops)) > 1:
                raise Fault("the waves wait at different barriers, or one has ended")
            waves[0].group.lds.barrier(waves)
            longest = [max(trips) for trips in zip(*[wave.trips for wave in waves], strict=True)]
            for wave in waves:
                wave.trips = list(longest)
    except Fault as fault:
        raise Fault(f"workgroup {index}: {fault}") from None
