"""The scalar unit (SOP1, SOP2, SOPK, SOPC): opcode, types, and what it does with Python integers.

An entry is (types of the destination and the sources, function). The function takes the sources and SCC and returns
(result, SCC); None leaves SCC alone, and a destination of "-" has no result.
"""

from __future__ import annotations

import operator
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
    "s_movk_i32": ("i32 k", lambda a, c: (a, None)),
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
    "s_abs_i32": ("i32 i32", _not_zero(abs)),
    # bits
    "s_bfe_u32": ("u32 u32 u32", _not_zero(lambda a, b: _field(a, b, False))),
    "s_bfe_i32": ("i32 i32 u32", _not_zero(lambda a, b: _field(a, b, True))),
    "s_lshl1_add_u32": ("u32 u32 u32", lambda a, b, c: ((a << 1) + b, int((a << 1) + b > LOW))),
    "s_lshl2_add_u32": ("u32 u32 u32", lambda a, b, c: ((a << 2) + b, int((a << 2) + b > LOW))),
    "s_lshl3_add_u32": ("u32 u32 u32", lambda a, b, c: ((a << 3) + b, int((a << 3) + b > LOW))),
    "s_lshl4_add_u32": ("u32 u32 u32", lambda a, b, c: ((a << 4) + b, int((a << 4) + b > LOW))),
    "s_pack_ll_b32_b16": ("u32 u32 u32", lambda a, b, c: (a & 0xFFFF | b << 16, None)),
}

LOGIC: dict[str, Callable[[int, int], int]] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
LOGIC["andn2"] = lambda a, b: a & ~b


def _by_width(width: int) -> dict[str, Entry]:
    u, i, bits = f"u{width}", f"i{width}", width - 1
    return {f"s_{name}_b{width}": (f"{u} {u} {u}", _not_zero(of, width)) for name, of in LOGIC.items()} | {
        f"s_mov_b{width}": (f"{u} {u}", lambda a, c: (a, None)),
        f"s_cselect_b{width}": (f"{u} {u} {u}", lambda a, b, c: (a if c else b, None)),
        f"s_not_b{width}": (f"{u} {u}", _not_zero(lambda a: ~a, width)),
        f"s_lshl_b{width}": (f"{u} {u} u32", _not_zero(lambda a, b: a << (b & bits), width)),
        f"s_lshr_b{width}": (f"{u} {u} u32", _not_zero(lambda a, b: a >> (b & bits), width)),
        f"s_ashr_i{width}": (f"{i} {i} u32", _not_zero(lambda a, b: a >> (b & bits), width)),
    }


def _by_sign(kind: str) -> dict[str, Entry]:
    """What there is of signed and of unsigned numbers of 32 bits."""
    two = f"{kind} {kind}"
    return {f"s_cmp_{name}_{kind}": (f"- {two}", _compare(order)) for name, order in _ORDER.items()} | {
        f"s_mul_hi_{kind}": (f"{kind} {two}", lambda a, b, c: (a * b >> 32, None)),
        f"s_min_{kind}": (f"{kind} {two}", lambda a, b, c: (min(a, b), int(a < b))),
        f"s_max_{kind}": (f"{kind} {two}", lambda a, b, c: (max(a, b), int(a >= b))),
    }


_ORDER = {name: getattr(operator, name) for name in ("eq", "gt", "ge", "lt", "le")} | {"lg": operator.ne}


def _compare(order: Callable[[int, int], bool]) -> Callable[..., tuple[None, int]]:
    return lambda a, b, c: (None, int(order(a, b)))


SOP |= _by_width(32) | _by_width(64) | _by_sign("i32") | _by_sign("u32")
SOP |= {f"s_cmp_{name}_u64": ("- u64 u64", _compare(_ORDER[name])) for name in ("eq", "lg")}

# EXEC becomes function(source, EXEC), the destination what EXEC was; SCC says whether a lane is left.
SAVEEXEC = {f"s_{name}_saveexec_b64": of for name, of in LOGIC.items()}

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
