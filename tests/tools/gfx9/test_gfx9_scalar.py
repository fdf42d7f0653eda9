"""Scalar opcodes against formulas over Python integers: result and SCC."""

import operator
import random

import pytest

from tests.tools.gfx9.gfx9_lanes import EDGES, execute, wave
from tools.gfx9.operand import signed
from tools.gfx9.scalar import SOP

M32 = 2**32 - 1


def s32(x):
    return signed(x % 2**32, 32)


def nonzero(value, width=32):
    value %= 2**width
    return value, int(value != 0)


def overflow(value):
    return value, int(value != s32(value))


def bfe(value, spec, is_signed):
    width, start = spec >> 16 & 127, spec & 31
    if width == 0:
        return 0
    out = value // 2**start % 2**width
    return out - 2**width if is_signed and out // 2 ** (width - 1) else out


# Each takes unsigned 64-bit sources (the opcode reads 32 of them where it is a 32-bit one) and SCC.
FORMULAS = {
    "s_add_u32": lambda a, b, c: (a + b, int(a + b > M32)),
    "s_addc_u32": lambda a, b, c: (a + b + c, int(a + b + c > M32)),
    "s_sub_u32": lambda a, b, c: (a - b, int(a < b)),
    "s_subb_u32": lambda a, b, c: (a - b - c, int(a < b + c)),
    "s_add_i32": lambda a, b, c: overflow(s32(a) + s32(b)),
    "s_sub_i32": lambda a, b, c: overflow(s32(a) - s32(b)),
    "s_mul_i32": lambda a, b, c: (a * b, c),
    "s_mul_hi_u32": lambda a, b, c: (a * b // 2**32, c),
    "s_mul_hi_i32": lambda a, b, c: (s32(a) * s32(b) // 2**32, c),
    "s_abs_i32": lambda a, c: nonzero(abs(s32(a))),
    "s_bfe_u32": lambda a, b, c: nonzero(bfe(a, b, False)),
    "s_bfe_i32": lambda a, b, c: nonzero(bfe(s32(a), b, True)),
    "s_pack_ll_b32_b16": lambda a, b, c: (a % 2**16 + b % 2**16 * 2**16, c),
}
for k in (1, 2, 3, 4):
    FORMULAS[f"s_lshl{k}_add_u32"] = lambda a, b, c, k=k: (a * 2**k + b, int(a * 2**k + b > M32))
for kind, number in {"i32": s32, "u32": int}.items():
    FORMULAS[f"s_min_{kind}"] = lambda a, b, c, s=number: (min(s(a), s(b)), int(s(a) < s(b)))
    FORMULAS[f"s_max_{kind}"] = lambda a, b, c, s=number: (max(s(a), s(b)), int(s(a) >= s(b)))
for width in (32, 64):
    FORMULAS[f"s_mov_b{width}"] = lambda a, c: (a, c)
    FORMULAS[f"s_cselect_b{width}"] = lambda a, b, c: (a if c else b, c)
    FORMULAS[f"s_not_b{width}"] = lambda a, c, w=width: nonzero(2**w - 1 - a, w)
    FORMULAS[f"s_lshl_b{width}"] = lambda a, b, c, w=width: nonzero(a * 2 ** (b % w), w)
    FORMULAS[f"s_lshr_b{width}"] = lambda a, b, c, w=width: nonzero(a // 2 ** (b % w), w)
    FORMULAS[f"s_ashr_i{width}"] = lambda a, b, c, w=width: nonzero(signed(a % 2**w, w) // 2 ** (b % w), w)
    for name, function in {"and": operator.and_, "or": operator.or_, "xor": operator.xor}.items():
        FORMULAS[f"s_{name}_b{width}"] = lambda a, b, c, f=function, w=width: nonzero(f(a, b), w)
    FORMULAS[f"s_andn2_b{width}"] = lambda a, b, c, w=width: nonzero(a & (2**w - 1 - b), w)
for name in ("eq", "lg", "gt", "ge", "lt", "le"):
    compare = operator.ne if name == "lg" else getattr(operator, name)
    FORMULAS[f"s_cmp_{name}_i32"] = lambda a, b, c, f=compare: (None, int(f(s32(a), s32(b))))
    FORMULAS[f"s_cmp_{name}_u32"] = lambda a, b, c, f=compare: (None, int(f(a, b)))
FORMULAS["s_cmp_eq_u64"] = lambda a, b, c: (None, int(a == b))
FORMULAS["s_cmp_lg_u64"] = lambda a, b, c: (None, int(a != b))
IMMEDIATE = {"s_movk_i32", "s_addk_i32", "s_mulk_i32"}


def test_gfx9_every_scalar_opcode_has_a_test():
    assert set(FORMULAS) | IMMEDIATE == set(SOP)


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_gfx9_scalar_opcode_is_its_formula(name):
    target, *kinds = SOP[name][0].split()
    rng = random.Random(name)
    for _ in range(60):
        w = wave()
        values, texts = [], []
        for k, kind in enumerate(kinds):
            wide = kind.endswith("64")
            values.append(rng.choice(EDGES) + (rng.choice(EDGES) << 32 if wide else 0))
            texts.append(f"s[{4 * k}:{4 * k + 1}]" if wide else f"s{4 * k}")
            (w.set_scalar64 if wide else w.set_scalar)(4 * k, values[-1])
        w.scc = rng.randrange(2)
        expected, scc = FORMULAS[name](*values, w.scc)
        width = 64 if target.endswith("64") else 32
        to = [] if target == "-" else ["s[20:21]" if width == 64 else "s20"]
        execute(w, f"{name} {', '.join(to + texts)}")
        assert w.scc == scc, (name, values)
        if expected is not None:
            assert (w.scalar64(20) if width == 64 else w.scalar(20)) == expected % 2**width, (name, values)
