"""Loads and stores: scalar memory, buffers through a descriptor, global memory, LDS."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tools.gfx9.operand import Operands, get64
from tools.gfx9.parse import Fault, Instruction
from tools.gfx9.wave import ARGUMENTS, LGKM, LOAD, MEMORY, SHARED, STORE, VMEM, Run, Wave

# What the last part of a mnemonic moves: bytes of one word, words.
WIDTHS = {f"dword{x}": (4, n) for x, n in (("", 1), ("x2", 2), ("x3", 3), ("x4", 4))}
WIDTHS |= {"ubyte": (1, 1), "sbyte": (1, 1), "byte": (1, 1), "ushort": (2, 1), "short": (2, 1)}
# What a load makes 32 bits of, by zeros or by its sign; stores name their width alone.
EXTENDED = {"ubyte": np.uint8, "sbyte": np.int8, "ushort": np.uint16}
VECTOR = re.compile(r"(buffer|global)_(load|store)_(\w+)")
# Word 3 of the descriptor of a raw buffer, as the compiler writes it: 32-bit data, no swizzle, no thread id.
RAW_WORD3 = 0x27000
# Of a descriptor's word 1: stride and swizzle, which a raw buffer has not.
STRIDE_AND_SWIZZLE = 0xFFFF0000


def bind_scalar_load(i: Instruction, ops: Operands) -> Run:
    """s_load_dword and wider: address, plus an immediate or an SGPR."""
    ops.count(3)
    i.only()
    words = int(i.name.removeprefix("s_load_dword").removeprefix("x") or 1)
    target, base = ops.reg(0, "s", words), ops.reg(1, "s", 2)
    offset = ops.read(i.operands[2], "s.u32")

    def run(w: Wave) -> None:
        address = w.scalar64(base) + offset(w)
        if address % 4:
            raise Fault("a scalar load from an address that is no multiple of 4")
        data = w.group.memory.load(np.array([address], np.int64), words)[0]
        source = ARGUMENTS if w.group.memory.find(address, address).name == "arguments" else MEMORY
        w.issue_scalar_load(target, [int(x) for x in data], source)

    return run


def bind_vector(i: Instruction, ops: Operands) -> Run:
    found = VECTOR.fullmatch(i.name)
    if found is None or found.group(3) not in WIDTHS:
        raise i.refuse("the memory instruction is not modelled")
    space, verb, what = found.groups()
    size, words = WIDTHS[what]
    is_load = verb == "load"
    if size < 4 and is_load != (what in EXTENDED):
        raise i.refuse("the memory instruction is not modelled")
    data_at = 0 if is_load or space == "buffer" else 1
    data = ops.reg(data_at, "v", words)
    address = _buffer_address(i, ops, words * size) if space == "buffer" else _global_address(i, ops, is_load)
    if is_load:
        return _load(address, data, size, words, EXTENDED.get(what, np.uint32))
    return _store(address, data, size, words)


def _load(address: Any, data: int, size: int, words: int, kind: Any) -> Run:
    def run(w: Wave) -> None:
        addresses, inside = address(w)
        values = np.zeros((words, 64), np.uint32)
        if inside.any():
            values[:, inside] = w.group.memory.load(addresses[inside], words, size).astype(kind).astype(np.uint32).T
        w.issue_load(VMEM, LOAD, range(data, data + words), values)

    return run


def _store(address: Any, data: int, size: int, words: int) -> Run:
    keep = np.uint32((1 << 8 * size) - 1)
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[size]

    def run(w: Wave) -> None:
        addresses, inside = address(w)
        for register_ in range(data, data + words):
            w.need(register_)
        if inside.any():
            values = (w.v[data : data + words, inside].T & keep).astype(kind)
            w.group.memory.store(addresses[inside], values, size)
        w.issue_store(VMEM, STORE)

    return run


def _buffer_address(i: Instruction, ops: Operands, width: int) -> Callable[[Wave], tuple[np.ndarray, np.ndarray]]:
    """Addresses and the lanes inside the descriptor's bounds; lanes outside load 0 and store nothing."""
    ops.count(4)
    i.only("offen", "offset")
    immediate, per_lane = i.number("offset"), "offen" in i.modifiers
    if not per_lane and i.operands[1] != "off":
        raise i.refuse("an address register without offen is not modelled")
    lane_offset = ops.read(i.operands[1], "u32") if per_lane else None
    descriptor, scalar_offset = ops.reg(2, "s", 4), ops.read(i.operands[3], "s.u32")

    def address(w: Wave) -> tuple[np.ndarray, np.ndarray]:
        low, high, records, word3 = (w.scalar(descriptor + k) for k in range(4))
        if high & STRIDE_AND_SWIZZLE or word3 != RAW_WORD3:
            raise Fault(f"a buffer descriptor with words {high:#x} and {word3:#x} is not modelled")
        offset = np.full(64, immediate, np.int64)
        if lane_offset is not None:
            offset += lane_offset(w)
        more = scalar_offset(w)
        # The manual is not clear on accesses that lie across the bound, or inside it but for the scalar offset.
        inside, outside = offset + more + width <= records, np.minimum(offset, offset + more) >= records
        if (w.active & ~inside & ~outside).any():
            raise Fault("an access across the descriptor's bound is not modelled")
        return (low | high << 32) + offset + more, inside & w.active

    return address


def _global_address(i: Instruction, ops: Operands, is_load: bool) -> Callable[[Wave], tuple[np.ndarray, np.ndarray]]:
    """A 64-bit address in each lane, or one in SGPRs plus 32 bits in each lane; plus a signed immediate."""
    ops.count(3)
    i.only("offset")
    immediate = i.number("offset")
    lane_at = 1 if is_load else 0
    if i.operands[2] == "off":
        first = ops.reg(lane_at, "v", 2)
        return lambda w: (get64(w, first).view(np.int64) + immediate, w.active)
    base, lane = ops.reg(2, "s", 2), ops.reg(lane_at, "v", 1)

    def address(w: Wave) -> tuple[np.ndarray, np.ndarray]:
        w.need(lane)
        return w.u[lane].astype(np.int64) + (w.scalar64(base) + immediate), w.active

    return address


# Bytes of what an instruction moves. A read of less than a word fills the word with zeros.
PLAIN = {"b32": 4, "b64": 8, "b96": 12, "b128": 16}
READS, WRITES = PLAIN | {"u8": 1, "u16": 2}, PLAIN | {"b8": 1, "b16": 2}
DS = re.compile(r"ds_(read|write)(2|2st64)?_(\w+)")


def bind_lds(i: Instruction, ops: Operands) -> Run:
    """ds_read, ds_write, and their pairs whose two offsets count words of the data's width (64 of them: st64)."""
    if i.name in ACROSS:
        return ACROSS[i.name](i, ops)
    found = DS.fullmatch(i.name)
    widths = {} if found is None else PLAIN if found[2] else READS if found[1] == "read" else WRITES
    if found is None or found[3] not in widths:
        raise i.refuse("the LDS instruction is not modelled")
    verb, pair, what = found.groups()
    width = widths[what]
    names, unit = (("offset0", "offset1"), width * (64 if pair == "2st64" else 1)) if pair else (("offset",), 1)
    i.only(*names)
    offsets = [i.number(name) * unit for name in names]
    return (_lds_read if verb == "read" else _lds_write)(ops, offsets, width)


def _index(w: Wave, address: int, offsets: list[int], width: int) -> np.ndarray:
    """[active lanes, bytes of all offsets]."""
    w.need(address)
    lanes = w.u[address].astype(np.int64)[w.active]
    return np.concatenate([w.group.lds.index(lanes + offset, width) for offset in offsets], axis=1)


def _lds_read(ops: Operands, offsets: list[int], width: int) -> Run:
    ops.count(2)
    each = -(-width // 4)
    total = each * len(offsets)
    target, address = ops.reg(0, "v", total), ops.reg(1, "v", 1)

    def run(w: Wave) -> None:
        index = _index(w, address, offsets, width)
        data = np.zeros((64, 4 * total), np.uint8)
        data[w.active, : index.shape[1]] = w.group.lds.load(w.number, index)
        w.issue_load(LGKM, SHARED, range(target, target + total), data.view(np.uint32).T, (False, index))

    return run


def _lds_write(ops: Operands, offsets: list[int], width: int) -> Run:
    ops.count(1 + len(offsets))
    address, each = ops.reg(0, "v", 1), -(-width // 4)
    sources = [ops.reg(1 + k, "v", each) + j for k in range(len(offsets)) for j in range(each)]

    def run(w: Wave) -> None:
        for source in sources:
            w.need(source)
        index = _index(w, address, offsets, width)
        data = np.ascontiguousarray(w.v[sources].T).view(np.uint8)[w.active, : index.shape[1]]
        w.group.lds.store(w.number, index, data)
        w.issue_store(LGKM, SHARED, (True, index))

    return run


def _read_transposed(i: Instruction, ops: Operands) -> Run:
    """gfx950. Each lane reads four 16-bit elements; in a group of 16 lanes lane k takes element k % 4 of lanes
    k // 4, 4 + k // 4, 8 + k // 4 and 12 + k // 4. Source: AMD's CDNA4 manual, section 11.4."""
    ops.count(2)
    i.only("offset")
    target, address, offset = ops.reg(0, "v", 2), ops.reg(1, "v", 1), i.number("offset")
    lane = np.arange(64)[:, None]
    donor = (lane & ~15) + 4 * np.arange(4) + (lane & 15) // 4

    def run(w: Wave) -> None:
        w.need_all_lanes(i.name)
        index = _index(w, address, [offset], 8)
        elements = w.group.lds.load(w.number, index).view(np.uint16)
        values = np.ascontiguousarray(elements[donor, lane & 3]).view(np.uint32).T
        w.issue_load(LGKM, SHARED, range(target, target + 2), values, (False, index))

    return run


def _bpermute(i: Instruction, ops: Operands) -> Run:
    """Each lane takes the data of lane (address + offset) / 4 % 64. It moves through the LDS unit, not its memory."""
    ops.count(3)
    i.only("offset")
    target, address, source = (ops.reg(k, "v", 1) for k in range(3))
    offset = i.number("offset")

    def run(w: Wave) -> None:
        w.need_all_lanes(i.name)
        w.need(address)
        w.need(source)
        lanes = (w.u[address].astype(np.int64) + offset) // 4 % 64
        w.issue_load(LGKM, SHARED, (target,), [w.u[source][lanes]])

    return run


ACROSS = {"ds_read_b64_tr_b16": _read_transposed, "ds_bpermute_b32": _bpermute}
