"""Bugs planted in the assembly of a variant: name to a function from the text to the wrong text.

Each changes one thing on the way of a query tile (the launches below run one) or of a KV row.
"""

import re
from collections.abc import Callable

from tools.gfx9.parse import Instruction


def nth(pattern: str, new: str | Callable[[re.Match[str]], str], which: int = 0) -> Callable[[str], str]:
    """Replace one match, counted from 0, or from the end where negative."""

    def plant(text: str) -> str:
        found = list(re.finditer(pattern, text, re.MULTILINE))
        chosen = found[which]
        return (
            text[: chosen.start()]
            + (chosen.expand(new) if isinstance(new, str) else new(chosen))
            + text[chosen.end() :]
        )

    return plant


# Barriers between LDS accesses; those that only order loads in memory change no byte.
BARRIER = r"(^\tds_write.*\n(?:(?!\ts_barrier).*\n)*)\ts_barrier\n"
WAIT = r"^\ts_waitcnt (?:vm|lgkm)cnt\(\d+\).*\n"
MFMA = r"(v_mfma\w+ \S+) (v\[\d+:\d+\]), (v\[\d+:\d+\]),"
PLANTED: dict[str, Callable[[str], str]] = {
    "dropped barrier, first": nth(BARRIER, r"\1"),
    "dropped barrier, last": nth(BARRIER, r"\1", -1),
    "LDS offset of a read": nth(
        r"(ds_read\S+ v\[\d+:\d+\], v\d+) offset(1?):(\d+)", lambda m: f"{m[1]} offset{m[2]}:{int(m[3]) + 8}"
    ),
    "LDS offset of a write": nth(r"^(\tds_write_b\d+ .*?\])(?: offset:\d+)?$", r"\1 offset:48"),
    "swapped MFMA operands": nth(MFMA, r"\1 \3, \2,"),
    "fp8 op_sel": nth(r"(v_cvt\S+fp8_f32 .*?) op_sel:\[[01,]+\]", r"\1"),
    "wrong bound of the rows": nth(r"v_cmp_gt_i32", "v_cmp_ge_i32"),
    "wrong bound of a descriptor": nth(r"0x7ffffffe", "0x40", -1),
    "wrong kernel argument": nth(
        r"(s_load_dword\S* \S+ s\[0:1\], )0x(\w+)", lambda m: f"{m[1]}{int(m[2], 16) + 8:#x}", -1
    ),
}
SCALES = r"(v_mfma_scale\S+ \S+ \S+ \S+ \S+) (v\d+), (v\d+) "
# Over mxfp4 weights; another format takes another number of registers, or the assembler refuses it.
SCALED: dict[str, Callable[[str], str]] = {
    "op_sel of a scale": nth(r" op_sel:\[0,1,0\]", ""),
    "op_sel of the other scale": nth(r"op_sel:\[0,1,0\]", "op_sel:[1,0,0]"),
    "swapped scales": nth(SCALES, r"\1 \3, \2 "),
    "swapped sources": nth(r"(v_mfma_scale\S+ \S+) (\S+), (\S+),", r"\1 \3, \2,"),
    "cbsz": nth(r"(v_mfma_scale\S+ \S+) v\[(\d+):\d+\](.*) cbsz:4", lambda m: f"{m[1]} {eight(m[2])}{m[3]} cbsz:0"),
    "blgp": nth(r"(v_mfma_scale\S+ \S+ \S+) v\[(\d+):\d+\](.*) blgp:4", lambda m: f"{m[1]} {eight(m[2])}{m[3]} blgp:1"),
    "lane of a permutation": nth(r"(ds_bpermute_b32 .*)", r"\1 offset:4", -1),
    "LDS offset of a scale": nth(r"(ds_read_u16 .*)", r"\1 offset:2"),
    "nibbles of a byte": nth(r"v_lshlrev_b16_e32 (v\d+), 8", r"v_lshlrev_b16_e32 \1, 4"),
    "high bit of a scale": nth(r"v_and_b32_e32 (v\d+), 0xff, ", r"v_and_b32_e32 \1, 0x7f, "),
}
OP_SEL_HI = nth(r"op_sel_hi:\[0,1,0\]", "op_sel_hi:[0,0,0]")
# gfx942 alone rounds to bfloat16 by integers, with the bit above the dropped ones; from the other word it is 0, so that
# a tie goes down, not to even.
WORD, OTHER_WORD = r"src0_sel:WORD_1", "src0_sel:WORD_0"
# On the way to fp8 it subtracts twice, and once for each pair of rotated values.
SUBTRACTED, ADDED = r"(v_pk_add_f32 .*?) neg_lo:\[0,1\] neg_hi:\[0,1\]", r"\1"


def eight(first: str) -> str:
    return f"v[{first}:{int(first) + 7}]"


def each(pattern: str, new: str, text: str) -> list[str]:
    return [nth(pattern, new, k)(text) for k in range(len(re.findall(pattern, text, re.MULTILINE)))]


def unmoved(i: Instruction) -> str:
    """The instruction with each value left in its lane, or "" if it moves none from one lane to another."""
    if i.encoding == "dpp":
        return f"{i.name}_e32 {', '.join(i.operands)}"
    if i.name == "ds_bpermute_b32":
        return f"v_mov_b32_e32 {i.operands[0]}, {i.operands[2]}"
    return "s_nop 0" if i.name.startswith("v_permlane") else ""


def not_saturated(text: str) -> str:
    """Neither the kernel's clamps nor the mode bit in which the conversion saturates: each is enough alone."""
    text = re.sub(r"v_med3_f32 (v\d+), (v\d+), .*", r"v_mov_b32_e32 \1, \2", text)
    return re.sub(r"s_setreg_imm32_b32 hwreg\(HW_REG_MODE, 23, 1\), 1", "s_nop 0", text)
