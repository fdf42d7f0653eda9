"""Vector opcodes, each against a formula over Python numbers, one lane at a time."""

import math
import operator
from fractions import Fraction

import numpy as np
import pytest

from tests.tools.gfx9.gfx9_lanes import execute, fill, nearest_float32, source, wave
from tools.gfx9.operand import signed
from tools.gfx9.vector import SPECIAL, VOP

M32 = 0xFFFFFFFF


def field(value, offset, width, is_signed):
    out = value >> (offset & 31) & ((1 << (width & 31)) - 1)
    return signed(out, width & 31) if is_signed and width & 31 else out


def perm(a, b, selector):
    data, out = a << 32 | b, 0
    for k in range(4):
        pick = selector >> 8 * k & 255
        sign = 255 * (data >> (16 * (pick - 8) + 15) & 1) if 8 <= pick < 12 else 0
        out |= (data >> 8 * pick & 255 if pick < 8 else sign if pick < 12 else 0 if pick == 12 else 255) << 8 * k
    return out


def fused(a, b, c):
    if not all(map(math.isfinite, (a, b, c))) or abs(a * b) > 1e38 or abs(a * b + c) > 1e38:
        with np.errstate(all="ignore"):
            return float(np.float32(a * b + c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return a * b + c if exact == 0 else nearest_float32(exact)


def extreme(choose, *values):
    return choose((x for x in values if not math.isnan(x)), default=math.nan)


def median(a, b, c):
    numbers_ = [x for x in (a, b, c) if not math.isnan(x)]
    return sorted(numbers_)[1] if len(numbers_) == 3 else min(numbers_, default=math.nan)


def field_of(x):
    """The exponent field, which a denormal has at 0."""
    return max(math.frexp(x)[1], -126)


def fixup(q, d, n):
    negative = math.copysign(1, d) * math.copysign(1, n) < 0
    if math.isnan(n) or math.isnan(d) or (n == 0 and d == 0) or (math.isinf(n) and math.isinf(d)):
        return math.nan
    if d == 0 or math.isinf(n):
        return -math.inf if negative else math.inf
    if math.isinf(d) or n == 0 or field_of(n) - field_of(d) < -150:
        return -0.0 if negative else 0.0
    return -abs(q) if negative else abs(q)


def to_uint(a):
    return 0 if math.isnan(a) or a < 0 else min(int(min(a, 2.0**33)), M32)


def bf16(a):
    if math.isnan(a):
        return None
    raw = int(np.float32(a).view(np.uint32))
    if math.isinf(a):
        return raw >> 16
    return (raw + 0x7FFF + (raw >> 16 & 1)) >> 16


FORMULAS = {
    "v_cndmask_b32": lambda a, b, c: b if c else a,
    "v_not_b32": lambda a: M32 - a,
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_and_or_b32": lambda a, b, c: (a & b) | c,
    "v_lshlrev_b16": lambda n, a: a * 2 ** (n % 16),
    "v_ashrrev_i32": lambda n, a: math.floor(Fraction(a, 2 ** (n % 32))),
    "v_lshl_or_b32": lambda a, n, b: (a * 2 ** (n % 32)) % 2**32 | b,
    "v_alignbit_b32": lambda a, b, n: (a * 2**32 + b) // 2 ** (n % 32),
    "v_alignbyte_b32": lambda a, b, n: (a * 2**32 + b) // 2 ** (8 * (n % 4)),
    "v_bfe_u32": lambda a, o, n: field(a, o, n, False),
    "v_bfe_i32": lambda a, o, n: field(a % 2**32 if o % 32 + n % 32 <= 32 else a, o, n, True),
    "v_bfi_b32": lambda m, a, b: (m & a) | ((M32 - m) & b),
    "v_bfrev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_perm_b32": perm,
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_add_lshl_u32": lambda a, b, n: (a + b) * 2 ** (n % 32),
    "v_lshl_add_u32": lambda a, n, b: a * 2 ** (n % 32) + b,
    "v_lshl_add_u64": lambda a, n, b: a * 2 ** (n % 8) + b,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_i32": lambda a, b: a * b // 2**32,
    "v_mul_hi_u32": lambda a, b: a * b // 2**32,
    "v_mul_u32_u24": lambda a, b: (a % 2**24) * (b % 2**24),
    "v_mul_i32_i24": lambda a, b: signed(a % 2**24, 24) * signed(b % 2**24, 24),
    "v_mad_i32_i24": lambda a, b, c: signed(a % 2**24, 24) * signed(b % 2**24, 24) + c,
    "v_ashrrev_i64": lambda n, a: math.floor(Fraction(a, 2 ** (n % 64))),
    "v_mad_u32_u24": lambda a, b, c: (a % 2**24) * (b % 2**24) + c,
    "v_mul_f32": lambda a, b: a * b,
    "v_fma_f32": fused,
    "v_min_f32": lambda a, b: extreme(min, a, b),
    "v_max_f32": lambda a, b: extreme(max, a, b),
    "v_min3_f32": lambda a, b, c: extreme(min, a, b, c),
    "v_max3_f32": lambda a, b, c: extreme(max, a, b, c),
    "v_med3_f32": median,
    "v_rcp_f32": lambda a: math.copysign(math.inf, a) if a == 0 else 1 / a,
    "v_div_fixup_f32": fixup,
    "v_cvt_u32_f32": to_uint,
    "v_cvt_pk_bf16_f32": lambda a, b: None if None in (bf16(a), bf16(b)) else bf16(a) | bf16(b) << 16,
    "v_cmp_o_f32": lambda a, b: not (math.isnan(a) or math.isnan(b)),
    "v_cmp_u_f32": lambda a, b: math.isnan(a) or math.isnan(b),
    "v_cmp_lg_f32": lambda a, b: a < b or a > b,
    "v_cmp_neq_f32": lambda a, b: a != b,
}
FORMULAS |= dict.fromkeys(("v_mov_b32", "v_mov_b64", "v_accvgpr_read_b32"), lambda a: a) | dict.fromkeys(
    ("v_cvt_f32_u32", "v_cvt_f32_i32"), float
)
for width in (32, 64):
    FORMULAS[f"v_lshlrev_b{width}"] = lambda n, a, w=width: a * 2 ** (n % w)
    FORMULAS[f"v_lshrrev_b{width}"] = lambda n, a, w=width: a // 2 ** (n % w)
for kind in ("i32", "u32"):
    FORMULAS |= {f"v_min_{kind}": min, f"v_max_{kind}": max}
for kind in ("u32", "f32"):
    FORMULAS |= {f"v_add_{kind}": operator.add, f"v_sub_{kind}": operator.sub, f"v_subrev_{kind}": lambda a, b: b - a}
for order in ("lt", "le", "eq", "ge", "gt"):
    compare = getattr(operator, order)
    FORMULAS |= {f"v_cmp_{order}_{kind}": compare for kind in ("i32", "u32", "i64", "u64", "f32")}
FORMULAS |= {f"v_cmp_ne_{kind}": lambda a, b: a != b for kind in ("i32", "u32", "i64", "u64")}
# Tested by name, in test_gfx9_special.py and test_gfx9_programs.py.
OWN_TESTS = {"v_fmac_f32", "v_div_scale_f32", "v_sub_co_u32", "v_subb_co_u32"}


def result(w, kind):
    if kind == "mask":
        return [bool(w.scalar64(20) >> lane & 1) for lane in range(64)]
    if kind == "f32":
        return [float(x) for x in w.f[20]]
    if kind == "u16":
        return [int(x) & 0xFFFF for x in w.u[20]]
    low = [int(x) for x in w.u[20]]
    return [x | int(h) << 32 for x, h in zip(low, w.u[21], strict=True)] if kind.endswith("64") else low


def as_stored(value, kind):
    """A formula's number as the register holds it; None where the formula leaves it open."""
    if kind == "f32":
        with np.errstate(all="ignore"):
            return float(np.float32(value))
    return value if value is None or kind == "mask" else int(value) % 2 ** int(kind[1:])


@pytest.mark.parametrize("name", sorted(set(VOP) - OWN_TESTS))
def test_gfx9_vector_opcode_is_its_formula_in_every_lane(name):
    kind, *kinds = VOP[name][0].split()
    target = {"mask": "s[20:21]", "u64": "v[20:21]", "i64": "v[20:21]"}.get(kind, "v20")
    for seed in range(3):
        w = wave()
        sources = [source(w, one, 2 * at, 10 * seed + at) for at, one in enumerate(kinds)]
        execute(w, f"{name} {target}, " + ", ".join(text for text, _ in sources))
        for got, *values in zip(result(w, kind), *[column for _, column in sources], strict=True):
            expected = as_stored(FORMULAS[name](*values), kind)
            same = expected is None or got == expected or (math.isnan(expected) and math.isnan(got))
            assert same, (name, values, got, expected)


# Not v_div_scale_f32: AMD's pseudo-code hands its first source on.
FLOATS = {name: kinds for name, (kinds, _) in VOP.items() if kinds.startswith("f32 f32")}


@pytest.mark.parametrize("name", FLOATS)
def test_gfx9_no_vector_opcode_hands_a_signalling_nan_on(name):
    registers = [20 if kind == "dst" else at for at, kind in enumerate(FLOATS[name].split()[1:])]
    for ones in ([], *([register] for register in registers)):
        w = wave()
        for register in registers:
            fill(w, register, 0x3F800000 if register in ones else 0x7F800001)
        execute(w, f"{name} v20, " + ", ".join(f"v{at}" for at in registers if at != 20))
        assert w.u[20][0] <= 0x7F800000 or w.u[20][0] & 1 << 22


def test_gfx9_every_vector_opcode_has_a_test():
    assert set(FORMULAS) | OWN_TESTS == set(VOP)
    named = "pk_mul_f32 pk_add_f32 pk_mov_b32 cvt_pk_fp8_f32 cvt_scalef32_pk_fp8_f32 mad_u64_u32 mad_i64_i32"
    named += " div_fmas_f32 bitop3_b32 bitop3_b16 permlane16_swap_b32 permlane32_swap_b32 readfirstlane_b32"
    assert {f"v_{name}" for name in named.split()} == set(SPECIAL)
