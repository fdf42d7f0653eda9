"""The scalar unit (SOP1, SOP2, SOPK, SOPC): opcode, types, and what it does with Python integers.

An entry is (types of the destination and the sources, function). The function takes the sources and SCC and returns
(result, SCC); None leaves SCC alone, and a destination of "-" has no result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tools.gfx9.parse import Fault

Entry = tuple[str, Callable[..., tuple[Any, Any]]]
LOW = (1 << 32) - 1
READS_SCC = ("s_addc_u32", "s_subb_u32", "s_cselect_b32", "s_cselect_b64")


def _not_zero(function: Callable[..., int], width: int = 32) -> Callable[..., tuple[int, int]]:
    """SCC says whether the result, as the destination takes it, is not zero."""

    def run(*args: int) -> tuple[int, int]:
        result = function(*args[:-1]) & ((1 << width) - 1)
        return result, int(result != 0)

    return run


def _overflows(function: Callable[[int, int], int]) -> Callable[..., tuple[int, int]]:
    """SCC says whether the signed result overflowed."""

    def run(a: int, b: int, _: int) -> tuple[int, int]:
        result = function(a, b)
        return result, int(not -(1 << 31) <= result < 1 << 31)

    return run


def _field(value: int, spec: int, is_signed: bool) -> int:
    """Bits spec[4:0] and up of ``value``, spec[22:16] of them."""
    width = spec >> 16 & 0x7F
    bits = value >> (spec & 31) & ((1 << width) - 1)
    return bits - (1 << width) if is_signed and width and bits >> (width - 1) else bits


SOP: dict[str, Entry] = {
    # moves
    "s_mov_b32": ("u32 u32", lambda a, c: (a, None)),
    "s_mov_b64": ("u64 u64", lambda a, c: (a, None)),
    "s_movk_i32": ("i32 k", lambda a, c: (a, None)),
    "s_cselect_b32": ("u32 u32 u32", lambda a, b, c: (a if c else b, None)),
    "s_cselect_b64": ("u64 u64 u64", lambda a, b, c: (a if c else b, None)),
    "s_not_b32": ("u32 u32", _not_zero(lambda a: ~a)),
    "s_not_b64": ("u64 u64", _not_zero(lambda a: ~a, 64)),
    # arithmetic
    "s_add_u32": ("u32 u32 u32", lambda a, b, c: (a + b, a + b >> 32)),
    "s_addc_u32": ("u32 u32 u32", lambda a, b, c: (a + b + c, a + b + c >> 32)),
    "s_sub_u32": ("u32 u32 u32", lambda a, b, c: (a - b, int(b > a))),
    "s_subb_u32": ("u32 u32 u32", lambda a, b, c: (a - b - c, int(b + c > a))),
    "s_add_i32": ("i32 i32 i32", _overflows(lambda a, b: a + b)),
    "s_sub_i32": ("i32 i32 i32", _overflows(lambda a, b: a - b)),
    "s_addk_i32": ("i32 d k", _overflows(lambda a, b: a + b)),
    "s_mul_i32": ("i32 i32 i32", lambda a, b, c: (a * b, None)),
    "s_mulk_i32": ("i32 d k", lambda a, b, c: (a * b, None)),
    "s_mul_hi_u32": ("u32 u32 u32", lambda a, b, c: (a * b >> 32, None)),
    "s_mul_hi_i32": ("i32 i32 i32", lambda a, b, c: (a * b >> 32, None)),
    "s_abs_i32": ("i32 i32", _not_zero(abs)),
    "s_min_i32": ("i32 i32 i32", lambda a, b, c: (min(a, b), int(a < b))),
    "s_max_i32": ("i32 i32 i32", lambda a, b, c: (max(a, b), int(a >= b))),
    "s_min_u32": ("u32 u32 u32", lambda a, b, c: (min(a, b), int(a < b))),
    "s_max_u32": ("u32 u32 u32", lambda a, b, c: (max(a, b), int(a >= b))),
    # bits
    "s_and_b32": ("u32 u32 u32", _not_zero(lambda a, b: a & b)),
    "s_and_b64": ("u64 u64 u64", _not_zero(lambda a, b: a & b, 64)),
    "s_or_b32": ("u32 u32 u32", _not_zero(lambda a, b: a | b)),
    "s_or_b64": ("u64 u64 u64", _not_zero(lambda a, b: a | b, 64)),
    "s_xor_b32": ("u32 u32 u32", _not_zero(lambda a, b: a ^ b)),
    "s_xor_b64": ("u64 u64 u64", _not_zero(lambda a, b: a ^ b, 64)),
    "s_andn2_b32": ("u32 u32 u32", _not_zero(lambda a, b: a & ~b)),
    "s_andn2_b64": ("u64 u64 u64", _not_zero(lambda a, b: a & ~b, 64)),
    "s_lshl_b32": ("u32 u32 u32", _not_zero(lambda a, b: a << (b & 31))),
    "s_lshl_b64": ("u64 u64 u32", _not_zero(lambda a, b: a << (b & 63), 64)),
    "s_lshr_b32": ("u32 u32 u32", _not_zero(lambda a, b: a >> (b & 31))),
    "s_lshr_b64": ("u64 u64 u32", _not_zero(lambda a, b: a >> (b & 63), 64)),
    "s_ashr_i32": ("i32 i32 u32", _not_zero(lambda a, b: a >> (b & 31))),
    "s_ashr_i64": ("i64 i64 u32", _not_zero(lambda a, b: a >> (b & 63), 64)),
    "s_bfe_u32": ("u32 u32 u32", _not_zero(lambda a, b: _field(a, b, False))),
    "s_bfe_i32": ("i32 i32 u32", _not_zero(lambda a, b: _field(a, b, True))),
    "s_lshl1_add_u32": ("u32 u32 u32", lambda a, b, c: ((a << 1) + b, int((a << 1) + b > LOW))),
    "s_lshl2_add_u32": ("u32 u32 u32", lambda a, b, c: ((a << 2) + b, int((a << 2) + b > LOW))),
    "s_lshl3_add_u32": ("u32 u32 u32", lambda a, b, c: ((a << 3) + b, int((a << 3) + b > LOW))),
    "s_lshl4_add_u32": ("u32 u32 u32", lambda a, b, c: ((a << 4) + b, int((a << 4) + b > LOW))),
    "s_pack_ll_b32_b16": ("u32 u32 u32", lambda a, b, c: (a & 0xFFFF | b << 16, None)),
}

_ORDER: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


def _compare(order: Callable[[int, int], bool]) -> Callable[..., tuple[None, int]]:
    return lambda a, b, c: (None, int(order(a, b)))


SOP |= {
    f"s_cmp_{name}_{kind}": (f"- {kind} {kind}", _compare(order))
    for name, order in _ORDER.items()
    for kind in ("i32", "u32")
}
SOP |= {f"s_cmp_{name}_u64": ("- u64 u64", _compare(_ORDER[name])) for name in ("eq", "lg")}

# EXEC becomes function(source, EXEC), the destination what EXEC was; SCC says whether a lane is left.
SAVEEXEC: dict[str, Callable[[int, int], int]] = {
    "s_and_saveexec_b64": lambda a, e: a & e,
    "s_or_saveexec_b64": lambda a, e: a | e,
    "s_xor_saveexec_b64": lambda a, e: a ^ e,
    "s_andn2_saveexec_b64": lambda a, e: a & ~e,
}

# Whether the branch is taken, given SCC, VCC and EXEC as functions of the wave.
BRANCHES: dict[str, Callable[[Any], bool]] = {
    "s_branch": lambda w: True,
    "s_cbranch_scc0": lambda w: not scc(w),
    "s_cbranch_scc1": lambda w: bool(scc(w)),
    "s_cbranch_vccz": lambda w: w.scalar64(106) == 0,
    "s_cbranch_vccnz": lambda w: w.scalar64(106) != 0,
    "s_cbranch_execz": lambda w: w.exec == 0,
    "s_cbranch_execnz": lambda w: w.exec != 0,
}


def scc(wave: Any) -> int:
    """SCC; a fault where nothing has set it."""
    if wave.scc is None:
        raise Fault("SCC is undefined")
    return int(wave.scc)
