"""The vector unit (VOP1, VOP2, VOP3, VOPC): opcode, types, and what it does with the values of 64 lanes.

An entry is (types of the destination and the sources, function over arrays). A type in brackets is a destination beside
the first one; its value comes second. What is not plain arithmetic stands in ``SPECIAL`` below, with a function that
binds the instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tools.gfx9 import numbers
from tools.gfx9.operand import Operands, get64, put64
from tools.gfx9.parse import Fault, Instruction
from tools.gfx9.wave import ALL, Run, Wave, mask_of

Array = Any
U, U64 = np.uint32, np.uint64
FOUR, FIVE, SIX = np.uint32(15), np.uint32(31), np.uint64(63)
LOW24, EIGHT = np.uint32(0xFFFFFF), np.int32(8)


def _wide(x: Array) -> Array:
    return np.asarray(x).astype(np.int64 if np.asarray(x).dtype == np.int32 else np.uint64)


def _bfe_i32(value: Array, offset: Array, width: Array) -> Array:
    shift, count = _wide(offset & FIVE).astype(np.int64), _wide(width & FIVE).astype(np.int64)
    bits = _wide(value) >> shift & (np.int64(1) << count) - 1
    negative = (count > 0) & (bits >> np.maximum(count - 1, 0) & 1 == 1)
    return np.where(negative, bits - (np.int64(1) << count), bits).astype(np.int32)


def _align(a: Array, b: Array, n: Array) -> Array:
    return ((_wide(a) << U64(32) | _wide(b)) >> _wide(n)).astype(U)


def _bfe_u32(value: Array, offset: Array, width: Array) -> Array:
    return value >> (offset & FIVE) & ((U(1) << (width & FIVE)) - U(1))


def _bfrev(value: Array) -> Array:
    data = np.ascontiguousarray(np.atleast_1d(value)).view(np.uint8)
    return np.packbits(np.unpackbits(data, bitorder="little").reshape(-1, 32)[:, ::-1], bitorder="little").view(U)


def _perm(s0: Array, s1: Array, selector: Array) -> Array:
    """Each byte of the selector takes one of 8 bytes (S0 holds 4 to 7), a sign of one, 0x00 or 0xff."""
    data = np.empty((64, 14), np.uint8)
    pairs = np.empty((64, 2), U)
    pairs[:, 0], pairs[:, 1] = s1, s0
    data[:, :8] = pairs.view(np.uint8)
    data[:, 8:12] = (data[:, 1:8:2] >> 7) * np.uint8(255)
    data[:, 12], data[:, 13] = 0, 255
    picks = np.minimum(np.atleast_1d(selector).view(np.uint8).reshape(-1, 4), 13)
    if len(picks) == 1:
        return np.ascontiguousarray(data[:, picks[0]]).view(U)[:, 0]
    return np.take_along_axis(data, picks, axis=1).view(U)[:, 0]


VOP: dict[str, tuple[str, Callable[..., Any]]] = {
    # moves
    "v_mov_b32": ("u32 u32", lambda a: a),
    "v_accvgpr_read_b32": ("u32 u32", lambda a: a),
    "v_mov_b64": ("u64 u64", lambda a: a),
    "v_cndmask_b32": ("u32 u32 u32 mask", lambda a, b, c: np.where(c, b, a)),
    # bits
    "v_not_b32": ("u32 u32", lambda a: ~a),
    "v_and_b32": ("u32 u32 u32", lambda a, b: a & b),
    "v_or_b32": ("u32 u32 u32", lambda a, b: a | b),
    "v_xor_b32": ("u32 u32 u32", lambda a, b: a ^ b),
    "v_or3_b32": ("u32 u32 u32 u32", lambda a, b, c: a | b | c),
    "v_and_or_b32": ("u32 u32 u32 u32", lambda a, b, c: a & b | c),
    "v_lshlrev_b16": ("u16 u16 u16", lambda n, a: a << (n & FOUR)),
    "v_lshlrev_b32": ("u32 u32 u32", lambda n, a: a << (n & FIVE)),
    "v_lshrrev_b32": ("u32 u32 u32", lambda n, a: a >> (n & FIVE)),
    "v_ashrrev_i32": ("i32 u32 i32", lambda n, a: a >> (n & FIVE).astype(np.int32)),
    "v_lshlrev_b64": ("u64 u32 u64", lambda n, a: a << (_wide(n) & SIX)),
    "v_lshrrev_b64": ("u64 u32 u64", lambda n, a: a >> (_wide(n) & SIX)),
    "v_ashrrev_i64": ("i64 u32 i64", lambda n, a: a >> (_wide(n) & SIX).astype(np.int64)),
    "v_lshl_or_b32": ("u32 u32 u32 u32", lambda a, n, b: a << (n & FIVE) | b),
    "v_alignbit_b32": ("u32 u32 u32 u32", lambda a, b, n: _align(a, b, n & FIVE)),
    "v_alignbyte_b32": ("u32 u32 u32 u32", lambda a, b, n: _align(a, b, (n & U(3)) * U(8))),
    "v_bfe_u32": ("u32 u32 u32 u32", _bfe_u32),
    "v_bfe_i32": ("i32 i32 u32 u32", _bfe_i32),
    "v_bfi_b32": ("u32 u32 u32 u32", lambda m, a, b: m & a | ~m & b),
    "v_bfrev_b32": ("u32 u32", _bfrev),
    "v_perm_b32": ("u32 u32 u32 u32", _perm),
    # integers
    "v_add3_u32": ("u32 u32 u32 u32", lambda a, b, c: a + b + c),
    "v_add_lshl_u32": ("u32 u32 u32 u32", lambda a, b, n: (a + b) << (n & FIVE)),
    "v_lshl_add_u32": ("u32 u32 u32 u32", lambda a, n, b: (a << (n & FIVE)) + b),
    "v_lshl_add_u64": ("u64 u64 u32 u64", lambda a, n, b: (a << (_wide(n) & U64(7))) + b),
    "v_xad_u32": ("u32 u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    "v_mul_lo_u32": ("u32 u32 u32", lambda a, b: a * b),
    "v_mul_hi_i32": ("i32 i32 i32", lambda a, b: (a.astype(np.int64) * b >> 32).astype(np.int32)),
    "v_mul_hi_u32": ("u32 u32 u32", lambda a, b: (_wide(a) * _wide(b) >> U64(32)).astype(U)),
    "v_mul_u32_u24": ("u32 u32 u32", lambda a, b: (a & LOW24) * (b & LOW24)),
    "v_mad_u32_u24": ("u32 u32 u32 u32", lambda a, b, c: (a & LOW24) * (b & LOW24) + c),
    "v_mul_i32_i24": ("i32 i32 i32", lambda a, b: (a << EIGHT >> EIGHT) * (b << EIGHT >> EIGHT)),
    "v_mad_i32_i24": ("i32 i32 i32 i32", lambda a, b, c: (a << EIGHT >> EIGHT) * (b << EIGHT >> EIGHT) + c),
    "v_sub_co_u32": ("u32 [mask] u32 u32", lambda a, b: (a - b, a < b)),
    "v_subb_co_u32": ("u32 [mask] u32 u32 mask", lambda a, b, c: (a - b - c, _wide(a) < _wide(b) + c)),
    # floats
    "v_mul_f32": ("f32 f32 f32", lambda a, b: a * b),
    "v_fma_f32": ("f32 f32 f32 f32", numbers.fma),
    "v_fmac_f32": ("f32 f32 f32 dst", numbers.fma),
    "v_min_f32": ("f32 f32 f32", numbers.least),
    "v_max_f32": ("f32 f32 f32", numbers.greatest),
    "v_max3_f32": ("f32 f32 f32 f32", lambda a, b, c: numbers.greatest(numbers.greatest(a, b), c)),
    "v_min3_f32": ("f32 f32 f32 f32", lambda a, b, c: numbers.least(numbers.least(a, b), c)),
    "v_med3_f32": ("f32 f32 f32 f32", numbers.med3),
    "v_rcp_f32": ("f32 f32", lambda a: np.divide(1.0, a, dtype=np.float64).astype(np.float32)),
    "v_div_scale_f32": ("f32 [mask] f32 f32 f32", numbers.div_scale),
    "v_div_fixup_f32": ("f32 f32 f32 f32", numbers.div_fixup),
    # conversions
    "v_cvt_u32_f32": ("u32 f32", numbers.to_uint),
    "v_cvt_pk_bf16_f32": ("u32 f32 f32", lambda a, b: numbers.bf16_bits(a) | numbers.bf16_bits(b) << U(16)),
}

_SUMS = {"add": np.add, "sub": np.subtract, "subrev": lambda a, b: b - a}
_ORDER = {"lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
_INTEGERS = ("i32", "u32", "i64", "u64")
VOP |= {
    f"v_{n}_{t}": (f"{t} {t} {t}", f) for n, f in (("min", np.minimum), ("max", np.maximum)) for t in ("i32", "u32")
}
VOP |= {f"v_{n}_{t}": (f"{t} {t} {t}", f) for n, f in _SUMS.items() for t in ("u32", "f32")}
VOP |= {f"v_cvt_f32_{t}": (f"f32 {t}", lambda a: a.astype(np.float32)) for t in ("i32", "u32")}
VOP |= {f"v_cmp_{name}_{t}": (f"mask {t} {t}", order) for name, order in _ORDER.items() for t in (*_INTEGERS, "f32")}
VOP |= {f"v_cmp_ne_{t}": (f"mask {t} {t}", np.not_equal) for t in _INTEGERS}
VOP |= {
    "v_cmp_o_f32": ("mask f32 f32", lambda a, b: ~(np.isnan(a) | np.isnan(b))),
    "v_cmp_u_f32": ("mask f32 f32", lambda a, b: np.isnan(a) | np.isnan(b)),
    "v_cmp_lg_f32": ("mask f32 f32", lambda a, b: (a < b) | (a > b)),
    "v_cmp_neq_f32": ("mask f32 f32", np.not_equal),
}


def bind_vop(i: Instruction, ops: Operands) -> Run:
    """An entry of ``VOP`` on the operands of one instruction."""
    types, function = VOP[i.name]
    names, kinds = list(i.operands), types.split()
    if kinds[-1] == "dst":
        names.append(names[0])
        kinds[-1] = kinds[0]
    if len(names) != len(kinds):
        raise i.refuse(f"{len(kinds)} operands expected")
    write = ops.write(names[0], kinds[0])
    if i.encoding == "sdwa":
        return _sdwa(i, ops, write, function, names, kinds)
    if i.encoding == "dpp":
        return _dpp(i, ops, write, function, names, kinds)
    i.only()
    second = ops.write(names[1], "mask") if kinds[1] == "[mask]" else None
    first = 2 if second else 1
    reads = [ops.read(name, kind) for name, kind in zip(names[first:], kinds[first:], strict=True)]
    return _closure(write, second, function, reads)


def _closure(write: Any, second: Any, function: Callable[..., Any], reads: list[Any]) -> Run:
    if second is None:
        return lambda w: write(w, function(*[read(w) for read in reads]))

    def run(w: Wave) -> None:
        value, mask = function(*[read(w) for read in reads])
        write(w, value)
        second(w, mask)

    return run


# The part of a 32-bit register that SDWA takes or writes: its lowest bit, and its bits when moved down there.
SELECTS = {"DWORD": (0, 0xFFFFFFFF)}
SELECTS |= {f"WORD_{k}": (16 * k, 0xFFFF) for k in range(2)} | {f"BYTE_{k}": (8 * k, 0xFF) for k in range(4)}


def _sdwa(i: Instruction, ops: Operands, write: Any, function: Any, names: list[str], kinds: list[str]) -> Run:
    """Integers whose sources are parts of a register; the result goes to a part of it, and zeros to the rest."""
    i.only("dst_sel", "dst_unused", "src0_sel", "src1_sel")
    part, rest = i.modifiers.get("dst_sel", ""), i.modifiers.get("dst_unused")
    if part not in SELECTS or rest != "UNUSED_PAD" or any(kind not in ("u32", "mask") for kind in kinds):
        raise i.refuse("SDWA with this destination or type is not modelled")
    up, kept = (U(x) for x in SELECTS[part])
    reads = []
    for k, name in enumerate(names[1:]):
        if kinds[k + 1] == "mask":
            reads.append(ops.read(name, "mask"))
            continue
        select = i.modifiers.get(f"src{k}_sel", "")
        if select not in SELECTS:
            raise i.refuse(f"src{k}_sel:{select} is not modelled")
        shift, keep = (U(x) for x in SELECTS[select])
        read = ops.read(name, "u32")
        reads.append(lambda w, read=read, shift=shift, keep=keep: read(w) >> shift & keep)
    return _closure(write, None, lambda *given: (function(*given) & kept) << up, reads)


def _dpp_lanes(i: Instruction) -> np.ndarray:
    """The lane that each lane takes its first source from; beyond its row of 16 it is another row's."""
    lane = np.arange(64)
    row, place = lane & ~15, lane & 15
    if "row_ror" in i.modifiers:
        return row + (place - i.number("row_ror")) % 16
    if "row_shl" in i.modifiers:
        return lane + i.number("row_shl")
    if "row_shr" in i.modifiers:
        return lane - i.number("row_shr")
    if "row_mirror" in i.modifiers:
        return row + 15 - place
    if "row_half_mirror" in i.modifiers:
        return (lane & ~7) + 7 - (lane & 7)
    if "quad_perm" in i.modifiers:
        return (lane & ~3) + np.array(i.flags("quad_perm", (0, 0, 0, 0)))[lane & 3]
    raise i.refuse("this DPP move is not modelled")


def _dpp(i: Instruction, ops: Operands, write: Any, function: Any, names: list[str], kinds: list[str]) -> Run:
    """The first source comes from another lane. Of four lanes each, bank_mask says which of a row are written.

    bound_ctrl says what happens without a source; here there always is one for what is written.
    """
    moves = ("row_ror", "row_shl", "row_shr", "row_mirror", "row_half_mirror", "quad_perm")
    i.only(*moves, "row_mask", "bank_mask", "bound_ctrl")
    if i.number("row_mask") != 15 or any(kind not in ("u32", "f32") for kind in kinds):
        raise i.refuse("DPP with these masks or types is not modelled")
    lane, lanes = np.arange(64), _dpp_lanes(i)
    written = i.number("bank_mask") >> (lane % 16 // 4) & 1 == 1
    if (lanes[written] // 16 != lane[written] // 16).any() or not written.any():
        raise i.refuse("DPP that leaves its row is not modelled")
    lanes = np.where(written, lanes, lane)
    sources, targets = mask_of(np.isin(lane, lanes[written])), mask_of(written)
    first, *others = (ops.read(name, kind) for name, kind in zip(names[1:], kinds[1:], strict=True))

    def run(w: Wave) -> None:
        w.need_all_lanes("DPP")
        w.set_exec(sources)
        moved = first(w)[lanes]
        w.set_exec(targets)
        write(w, function(moved, *[read(w) for read in others]))
        w.set_exec(ALL)

    return run


def _packed(function: Callable[[Array, Array], Array]) -> Callable[[Instruction, Operands], Run]:
    """Two float32 operations; op_sel and op_sel_hi pick the half of each source for the low and the high one."""

    def bind(i: Instruction, ops: Operands) -> Run:
        ops.count(3)
        i.only("op_sel", "op_sel_hi", "neg_lo", "neg_hi")
        picks = i.flags("op_sel", (0, 0)), i.flags("op_sel_hi", (1, 1))
        signs = i.flags("neg_lo", (0, 0)), i.flags("neg_hi", (0, 0))
        target = ops.reg(0, "v", 2)
        bank = ["v" if name[0] in "va" else "s" for name in i.operands]
        source = [0 if i.operands[k] == "0" else ops.reg(k, bank[k], 2) for k in (1, 2)]

        def half(side: int, k: int) -> Callable[[Wave], Array]:
            zero = i.operands[k + 1] == "0"  # the same in both halves; of other constants the manual is not clear
            name = "0" if zero else f"{bank[k + 1]}{source[k] + picks[side][k]}"
            read = Operands(i).read(name, "f32")
            return (lambda w: -read(w)) if signs[side][k] else read

        reads = [[half(side, k) for k in (0, 1)] for side in (0, 1)]

        def run(w: Wave) -> None:
            low, high = (function(a(w), b(w)) for a, b in reads)
            w.put(w.f, target, low)
            w.put(w.f, target + 1, high)

        return run

    return bind


def _packed_move(i: Instruction, ops: Operands) -> Run:
    """Half op_sel[0] of the first source to the low register, half op_sel[1] of the second to the high one."""
    ops.count(3)
    i.only("op_sel")
    target, picks = ops.reg(0, "v", 2), i.flags("op_sel", (0, 0))
    sources = [ops.reg(k + 1, "v", 2) + picks[k] for k in (0, 1)]

    def run(w: Wave) -> None:
        for source in sources:
            w.need(source)
        low, high = (w.u[source].copy() for source in sources)
        w.put(w.u, target, low)
        w.put(w.u, target + 1, high)

    return run


def _to_fp8(i: Instruction, ops: Operands) -> Run:
    """Two float32 to two fp8 in one half of the destination; op_sel's last bit says which."""
    scaled = "scalef32" in i.name
    ops.count(4 if scaled else 3)
    i.only("op_sel")
    *sources, high = i.flags("op_sel", (0,) * len(i.operands))
    if any(sources) or (scaled and i.operands[3] != "1.0"):
        raise i.refuse("op_sel of a source, or a scale that is not 1.0, is not modelled")
    target, a, b = ops.reg(0, "v", 1), ops.read(i.operands[1], "f32"), ops.read(i.operands[2], "f32")

    def run(w: Wave) -> None:
        low, up = (numbers.fp8_bits(read(w), w.arch, w.saturate) for read in (a, b))
        w.put_half(target, low | up << U(8), bool(high))

    return run


def _mad64(i: Instruction, ops: Operands) -> Run:
    """a * b + c in 64 bits, and its 65th bit as a mask: of unsigned numbers the carry, of signed ones the sign.

    The compiler leaves the upper half of c undefined where it wants the lower half of the sum alone. The upper half of
    the sum and the carry are undefined then.
    """
    ops.count(5)
    i.only()
    kind = "i32" if i.name == "v_mad_i64_i32" else "u32"
    wide = np.int64 if kind == "i32" else np.uint64
    target, carry = ops.reg(0, "v", 2), ops.reg(1, "s", 2)
    a, b = (ops.read(name, kind) for name in i.operands[2:4])
    addend = ops.reg(4, "v", 2) if i.operands[4][0] in "va" else None
    constant = ops.read(i.operands[4], "u64") if addend is None else None

    def run(w: Wave) -> None:
        product = np.asarray(a(w)).astype(wide) * np.asarray(b(w)).astype(wide)
        c = constant(w) if constant else get64(w, addend, upper=False)
        undefined = 0 if constant else w.exec & ~w.known[addend + 1]
        total = np.broadcast_to(product + c.view(wide), (64,))
        over = total < product if kind == "u32" else (((product ^ total) & (c.view(wide) ^ total)) < 0) ^ (total < 0)
        put64(w, target, total)
        w.known[target + 1] &= ~undefined
        w.set_scalar64(carry, mask_of(np.broadcast_to(over, (64,))) & w.exec)
        if undefined:
            w.s[carry] = w.s[carry + 1] = None

    return run


def _div_fmas(i: Instruction, ops: Operands) -> Run:
    """fma; where VCC is set the quotient is scaled back, of which the manual says two different things."""
    ops.count(4)
    i.only()
    write, reads = ops.write(i.operands[0], "f32"), [ops.read(name, "f32") for name in i.operands[1:]]

    def run(w: Wave) -> None:
        if w.scalar64(106) & w.exec:
            raise Fault("v_div_fmas_f32 of a scaled quotient is not modelled")
        write(w, numbers.fma(*[read(w) for read in reads]))

    return run


def _bitop3(i: Instruction, ops: Operands) -> Run:
    """Any function of three bits, given as its truth table."""
    ops.count(4)
    i.only("bitop3")
    table, kind = i.number("bitop3"), "u" + i.name[-2:]
    write, reads = ops.write(i.operands[0], kind), [ops.read(name, kind) for name in i.operands[1:]]

    def run(w: Wave) -> None:
        a, b, c = (read(w) for read in reads)
        result = U(0)
        for k in range(8):
            if table >> k & 1:
                result = result | ((a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c))
        write(w, result)

    return run


def _swap_rows(width: int, i: Instruction, ops: Operands) -> Run:
    """The odd rows of ``width`` lanes of the first register change places with the even ones of the second."""
    ops.count(2)
    i.only()
    first, second = ops.reg(0, "v", 1), ops.reg(1, "v", 1)

    def run(w: Wave) -> None:
        w.need_all_lanes(i.name)
        w.need(first)
        w.need(second)
        one, two = (w.u[register].reshape(-1, 2, width).copy() for register in (first, second))
        odd = one[:, 1].copy()
        one[:, 1], two[:, 0] = two[:, 0], odd
        w.put(w.u, first, one.ravel())
        w.put(w.u, second, two.ravel())

    return run


def _readfirstlane(i: Instruction, ops: Operands) -> Run:
    """The lowest active lane's value to an SGPR; lane 0 where none is active."""
    ops.count(2)
    i.only()
    target, source = ops.reg(0, "s", 1), ops.reg(1, "v", 1)

    def run(w: Wave) -> None:
        lane = (w.exec & -w.exec).bit_length() - 1 if w.exec else 0
        w.need(source, 1 << lane)
        w.set_scalar(target, int(w.u[source][lane]))

    return run


SPECIAL: dict[str, Callable[[Instruction, Operands], Run]] = {
    "v_pk_mul_f32": _packed(lambda a, b: a * b),
    "v_pk_add_f32": _packed(lambda a, b: a + b),
    "v_pk_mov_b32": _packed_move,
    "v_cvt_pk_fp8_f32": _to_fp8,
    "v_cvt_scalef32_pk_fp8_f32": _to_fp8,
    "v_mad_u64_u32": _mad64,
    "v_mad_i64_i32": _mad64,
    "v_div_fmas_f32": _div_fmas,
    "v_bitop3_b32": _bitop3,
    "v_bitop3_b16": _bitop3,
    "v_permlane16_swap_b32": partial(_swap_rows, 16),
    "v_permlane32_swap_b32": partial(_swap_rows, 32),
    "v_readfirstlane_b32": _readfirstlane,
}
