"""Memory, LDS and waits: what faults, and what the kernels, executed in test_gfx9_kernel.py, do not read or write."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from tests.tools.gfx9.gfx9_lanes import execute, fill, wave
from tools.gfx9.parse import Fault


def with_buffer(size=1024, name="x"):
    """A wave; a buffer whose words are their own numbers; its descriptor in s[4:7], its address in s[2:3]."""
    w = wave()
    region = w.group.memory.add(name, np.arange(size // 4, dtype=np.uint32).view(np.uint8), True, True)
    for k, word in enumerate((region.start & 0xFFFFFFFF, region.start >> 32, 1 << 20, 0x27000)):
        w.set_scalar(4 + k, word)
    w.set_scalar64(2, region.start)
    return w, region


# Loads and stores -----------------------------------------------------------------------------------------------------


def test_gfx9_buffer_bound_gives_zero_and_drops_stores():
    w, region = with_buffer()
    w.set_scalar(6, 128)
    fill(w, 0, 4 * np.arange(64))
    fill(w, 1, 99)
    execute(w, "buffer_load_dword v2, v0, s[4:7], 0 offen", "s_waitcnt vmcnt(0)")
    execute(w, "buffer_store_dword v1, v0, s[4:7], 0 offen")
    assert list(w.u[2]) == [*range(32), *[0] * 32]
    assert list(region.data.view(np.uint32)[:64]) == [99] * 32 + list(range(32, 64))


BUFFER = "buffer_load_dwordx2 v[2:3], v0, s[4:7], 0 offen"


@pytest.mark.parametrize(
    ("word", "line", "why"),
    [
        ((6, 6), BUFFER, "across the descriptor's bound"),
        *[((5, 1 << bit), BUFFER, "descriptor with words") for bit in (16, 31)],
        *[((7, word), BUFFER, "descriptor with words") for word in (0x27001, 0)],
        *[(None, f"global_load_dword v2, v0, s[2:3] offset:{at}", "in no buffer") for at in (-4, 1024)],
        (None, "ds_read_u16 v2, v0 offset:1", "no multiple of 2"),
        (None, "ds_read_b32 v1, v0", "byte 0 is read before it is written"),
        (None, "ds_write_b32 v0, v0 offset:1024", "byte 1024 of 1024"),
    ],
)
def test_gfx9_an_access_that_is_not_modelled_or_leads_nowhere_faults(word, line, why):
    w, _ = with_buffer()
    if word:
        at, value = word
        w.set_scalar(at, (w.scalar(at) | value) if at == 5 else value)
    fill(w, 0, 0)
    with pytest.raises(Fault, match=why):
        execute(w, line)


def test_gfx9_global_memory_has_both_address_forms():
    w, region = with_buffer()
    fill(w, 0, 4 * np.arange(64))
    fill(w, 8, (region.start & 0xFFFFFFFF) + 4 * np.arange(64))
    fill(w, 9, region.start >> 32)
    execute(w, "global_load_dword v2, v0, s[2:3] offset:4", "global_load_dword v3, v[8:9], off offset:8")
    execute(w, "s_waitcnt vmcnt(0)")
    execute(w, "global_store_dword v0, v3, s[2:3]")
    assert list(w.u[2]) == list(1 + np.arange(64))
    assert list(region.data.view(np.uint32)[:64]) == list(2 + np.arange(64))


def test_gfx9_bytes_and_shorts_are_extended_and_stored_low():
    w, region = with_buffer()
    region.data[:] = np.arange(1024) % 251
    fill(w, 0, 2 * np.arange(64))
    execute(w, "global_load_ubyte v2, v0, s[2:3]", "global_load_ushort v3, v0, s[2:3]", "s_waitcnt vmcnt(0)")
    assert (w.u[2][5], w.u[3][5]) == (10, 10 | 11 << 8)
    execute(w, "buffer_load_sbyte v5, v0, s[4:7], 0 offen offset:100", "s_waitcnt vmcnt(0)")
    assert (w.u[5][5], w.u[5][30]) == (110, 0xFFFFFF00 | 160)
    fill(w, 4, 0xABCD)
    execute(w, "global_store_byte v0, v4, s[2:3]")
    assert list(region.data[:4]) == [0xCD, 1, 0xCD, 3]


def test_gfx9_bytes_that_are_not_the_operands_fault_and_inactive_lanes_touch_none():
    w, region = with_buffer()
    fill(w, 0, np.where(np.arange(64) < 4, 0, 1 << 30))
    w.set_exec(0xF)
    execute(w, "global_load_dword v2, v0, s[2:3]", "s_waitcnt vmcnt(0)")
    assert w.known[2] == 0xF
    w.set_exec((1 << 64) - 1)
    region.readable[8:12] = 0
    region.writable[4] = 0
    fill(w, 0, 0)
    fill(w, 1, 0)
    with pytest.raises(Fault, match="byte 8 of the buffer is not one to read"):
        execute(w, "global_load_dwordx4 v[2:5], v0, s[2:3]")
    with pytest.raises(Fault, match="byte 4 of the buffer is not one to write"):
        execute(w, "global_store_dword v0, v1, s[2:3] offset:4")


# Waits ----------------------------------------------------------------------------------------------------------------


VECTOR = "global_load_dword v2, v0, s[2:3]; global_load_dword v3, v0, s[2:3]"
STORE = "global_load_dword v2, v0, s[2:3]; global_store_dword v0, v0, s[2:3]"
SCALAR = "s_load_dword s10, s[2:3], 0x8; s_load_dwordx2 s[12:13], s[2:3], 0x10"
SHARED = "ds_write_b32 v0, v0; ds_read_b32 v1, v0; ds_read_b32 v2, v0"


@pytest.mark.parametrize(
    ("before", "line", "why"),
    [
        (VECTOR, "v_mov_b32_e32 v4, v2", "v2 is still being loaded"),
        (f"{VECTOR}; s_waitcnt vmcnt(1)", "v_mov_b32_e32 v4, v2", None),
        (f"{VECTOR}; s_waitcnt vmcnt(1)", "v_mov_b32_e32 v4, v3", "v3 is still being loaded"),
        (f"{VECTOR}; s_waitcnt vmcnt(1)", "v_mov_b32_e32 v3, 0", "v3 is written while a load to it is in flight"),
        (f"{STORE}; s_waitcnt vmcnt(1)", "v_mov_b32_e32 v4, v2", None),
        # Scalar loads arrive in any order, so that only a wait for 0 counts.
        (f"{SCALAR}; s_waitcnt lgkmcnt(1)", "s_mov_b32 s20, s10", "s10 is still being loaded"),
        (f"{SCALAR}; s_waitcnt lgkmcnt(1)", "s_mov_b32 s13, 0", "s13 is written while"),
        (f"{SCALAR}; s_waitcnt lgkmcnt(0)", "s_add_u32 s20, s10, s13", None),
        ("ds_bpermute_b32 v2, v0, v0", "v_mov_b32_e32 v4, v2", "v2 is still being loaded"),
        (f"{SHARED}; s_waitcnt lgkmcnt(1)", "v_mov_b32_e32 v3, v1", None),
        (f"{SHARED}; s_waitcnt lgkmcnt(1)", "v_mov_b32_e32 v3, v2", "v2 is still being loaded"),
    ],
)
def test_gfx9_a_loaded_register_is_undefined_until_a_wait_covers_the_load(before, line, why):
    w, _ = with_buffer()
    fill(w, 0, 4 * np.arange(64))
    execute(w, *before.split("; "))
    with pytest.raises(Fault, match=why) if why else nullcontext():
        execute(w, line)


# LDS ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "bits"), [("b8", 8), ("b16", 16)])
def test_gfx9_lds_writes_less_than_a_word_and_reads_it_back_over_zeros(width, bits):
    w = wave()
    fill(w, 0, bits // 8 * np.arange(64))
    fill(w, 1, 0xFEDCBA98 + np.arange(64))
    read = f"ds_read_u{bits} v2, v0"
    execute(w, f"ds_write_{width} v0, v1 offset:64", read + " offset:64", "s_waitcnt lgkmcnt(0)")
    assert list(w.u[2]) == [(0xBA98 + lane) % 2**bits for lane in range(64)]
    with pytest.raises(Fault, match="byte 0 is read before it is written"):
        execute(w, read)


def two_waves(lds_bytes=256):
    first, second = wave(lds_bytes=lds_bytes), wave(number=1)
    second.group = first.group
    for w in (first, second):
        fill(w, 0, 4 * np.arange(64))
    return first, second


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ds_write_b32 v0, v0", "ds_read_b32 v1, v0"),
        ("ds_read_b32 v1, v0", "ds_write_b32 v0, v0"),
        ("ds_write_b32 v0, v0", "ds_write_b32 v0, v0"),
    ],
)
@pytest.mark.parametrize(("waited", "barrier"), [(True, True), (True, False), (False, True)])
def test_gfx9_two_waves_meet_at_a_word_only_with_a_wait_and_a_barrier_between(one, other, waited, barrier):
    first, second = two_waves()
    execute(first, "ds_write_b32 v0, v0", "s_waitcnt lgkmcnt(0)")
    first.group.lds.barrier((first, second))
    execute(first, one, *["s_waitcnt lgkmcnt(0)"] * waited)
    if barrier:
        first.group.lds.barrier((first, second))
    with nullcontext() if waited and barrier else pytest.raises(Fault, match="LDS race"):
        execute(second, other)


def test_gfx9_two_waves_write_neighbouring_bytes_of_a_word_and_race_at_one():
    first, second = two_waves()
    execute(first, "ds_write_b8 v0, v0")
    execute(second, "ds_write_b8 v0, v0 offset:1")
    with pytest.raises(Fault, match="LDS race"):
        execute(second, "ds_write_b8 v0, v0")


def test_gfx9_bpermute_wraps_around_the_lanes():
    w = wave()
    fill(w, 0, 4 * np.arange(64) + 260)
    fill(w, 1, np.arange(64))
    execute(w, "ds_bpermute_b32 v2, v0, v1", "s_waitcnt lgkmcnt(0)")
    assert list(w.u[2]) == [*range(1, 64), 0]
