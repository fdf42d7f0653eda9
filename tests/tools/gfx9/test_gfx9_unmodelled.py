"""What is not modelled is an error that names the line; nothing is skipped."""

from pathlib import Path

import pytest

from tools.gfx9 import code
from tools.gfx9.code import Code
from tools.gfx9.machine import Program, bind, launch
from tools.gfx9.memory import Memory
from tools.gfx9.parse import Fault, Skipped, instruction, parse

HEAD = ".amdhsa_kernel k\n.end_amdhsa_kernel\n"
_, *UNKNOWN = (Path(__file__).parent / "unmodelled.s").read_text().splitlines()


@pytest.mark.parametrize("line", UNKNOWN)
def test_gfx9_what_is_not_modelled_is_refused_with_its_line(line):
    with pytest.raises(Skipped) as caught:
        bind(instruction(line, 7))
    assert "line 7" in str(caught.value)
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        # No wave reaches it.
        (" s_branch .L1\n s_sleep 3\n.L1:\n s_endpgm\n", "line 5: s_sleep 3"),
        *[(f" {data}\n s_endpgm\n", "directive") for data in (".long 0xbf800000", ".byte 1", ".fill 2, 4, 0")],
        (" s_nop 0\n", "runs on past"),
    ],
)
def test_gfx9_code_that_is_not_modelled_is_refused_reached_or_not(body, why):
    with pytest.raises(Skipped, match=why):
        Program(Code("gfx942", parse(f"{HEAD}k:\n{body}"), 2, 0, (), 0, 8, 8))


PART = " v_readfirstlane_b32 s3, v0\n s_cmp_eq_u32 s3, 0\n s_cbranch_scc1 .L0\n s_barrier\n.L0:\n s_nop 0"


@pytest.mark.parametrize(
    ("body", "waves", "why"),
    [
        (" s_nop 0\n v_mov_b32_e32 v1, v2", 1, "workgroup 5: line 5: v_mov_b32_e32 v1, v2: v2 is undefined"),
        (PART, 2, "different barriers, or one has ended"),
    ],
)
def test_gfx9_a_fault_names_the_workgroup_and_the_line_and_waves_may_not_part_at_a_barrier(body, waves, why):
    program = Program(Code("gfx942", parse(f"{HEAD}k:\n{body}\n s_endpgm\n"), 2, 0, (), 16, 8, 8))
    with pytest.raises(Fault, match=why):
        launch(program, Memory(), bytes(16), [5], waves, 256)


DESCRIPTOR = bytearray(64)
DESCRIPTOR[8:12] = (152).to_bytes(4, "little")
DESCRIPTOR[44:48] = (11).to_bytes(4, "little")
DESCRIPTOR[48:52] = (code.RSRC1_MODE | 5).to_bytes(4, "little")
DESCRIPTOR[52:56] = (16 << 1 | code.RSRC2_WORKGROUP_X).to_bytes(4, "little")
DESCRIPTOR[56:60] = bytes((8, 0, 14, 0))


def test_gfx9_descriptor_says_registers_and_preload():
    found = code._checked(bytes(DESCRIPTOR))
    assert found == {"user_sgprs": 16, "preloaded": 14, "argument_bytes": 152, "vgprs": 48, "accum_offset": 48}


@pytest.mark.parametrize(
    ("what", "places"),
    [
        ("LDS", [(0, 1)]),
        ("scratch", [(4, 1)]),
        ("float mode, IEEE or clamp", [(49, 0x10), (50, 0x01), (50, 0x20), (51, 0x04)]),
        ("SGPRs", [(52, 0x01), (53, 0x01), (53, 0x08)]),
        ("properties", [(56, 0x01)]),
        ("preload", [(58, 0x01)]),
        ("split", [(46, 1)]),
    ],
)
def test_gfx9_descriptor_bits_that_are_not_modelled_are_refused(what, places):
    for at, bit in places:
        changed = bytearray(DESCRIPTOR)
        changed[at] ^= bit
        with pytest.raises(Skipped, match=what):
            code._checked(bytes(changed))
