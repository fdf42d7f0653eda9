"""The code object: what a card would be given.

Nothing in the virtual environment disassembles gfx942 or gfx950. What runs is therefore the assembly, after Triton's
assembler and linker have turned it into a code object again and every byte of that one equals the given one: then the
text is a disassembly of the code object, descriptor and metadata included.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any

from tools.gfx9.parse import Listing, Skipped, parse

# compute_pgm_rsrc1: round to nearest even and all denormals kept (FLOAT_MODE), DX10_CLAMP, IEEE; the low ten bits count
# registers, and nothing else may be set.
RSRC1_MODE, RSRC1_COUNTS = 0xF0 << 12 | 1 << 21 | 1 << 23, 0x3FF
# compute_pgm_rsrc2: user SGPRs in bits 5:1, the workgroup's x in an SGPR after them.
RSRC2_WORKGROUP_X = 1 << 7
# kernel_code_properties: a pointer to the arguments in s[0:1] and nothing more.
KERNARG_POINTER = 1 << 3


@dataclass(frozen=True)
class Code:
    """One kernel."""

    arch: str  # "gfx942" or "gfx950"
    listing: Listing  # its instructions
    user_sgprs: int  # SGPRs that the dispatch fills; the workgroup's index follows
    preloaded: int  # arguments, in words, that the hardware loads into s[2:]
    arguments: tuple[tuple[int, int], ...]  # offset and size in bytes of each argument
    argument_bytes: int  # size of the argument block
    vgprs: int  # vector registers of a lane
    accum_offset: int  # where AGPRs begin among them


def assemble(text: str, arch: str) -> bytes:
    """A code object from assembly, by the last stage of Triton's own compiler for AMD cards.

    Raises:
        RuntimeError: the assembler refuses the text.
    """
    from triton._C.libtriton import llvm
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    llvm.init_targets()  # Where the compiled kernel comes from Triton's cache, no earlier stage has done it.
    backend = make_backend(GPUTarget("hip", arch, 64))
    return backend.make_hsaco(text, {}, backend.parse_options({"arch": arch}))


def load(text: str, arch: str, code_object: bytes | None = None) -> Code:
    """The kernel of ``text``, proved to be that of ``code_object``; by default its own.

    Raises:
        Skipped: they differ, or the kernel's descriptor asks for something that is not modelled.
    """
    made = assemble(text, arch)
    if code_object is not None and made != code_object:
        raise Skipped("the assembly is not that of the code object: assembled again it gives other bytes")
    listing = parse(text)
    descriptor = _descriptor(made, listing.name)
    arguments = tuple((int(a), int(b)) for a, b in re.findall(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)", text))
    return Code(arch=arch, listing=listing, arguments=arguments, **_checked(descriptor))


def _descriptor(elf: bytes, name: str) -> bytes:
    """The 64 bytes of the symbol ``name``.kd of a little-endian ELF64 file."""
    table_at, (entry, count) = struct.unpack_from("<Q", elf, 40)[0], struct.unpack_from("<HH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, table_at + k * entry) for k in range(count)]
    for _, kind, _, _, offset, size, link, _, _, width in sections:
        if kind != 11:  # SHT_DYNSYM
            continue
        for at in range(offset, offset + size, width):
            name_at, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", elf, at)
            start = sections[link][4] + name_at
            if elf[start : elf.index(b"\0", start)] == f"{name}.kd".encode():
                _, _, _, address, begin, *_ = sections[section]
                return elf[begin + value - address :][:64]
    raise Skipped(f"no descriptor of {name} in the code object")


def _checked(raw: bytes) -> dict[str, Any]:
    """What the descriptor says; everything that is not modelled is refused."""
    lds, scratch, arguments = struct.unpack_from("<III", raw)
    rsrc3, rsrc1, rsrc2 = struct.unpack_from("<III", raw, 44)
    properties, preload = struct.unpack_from("<HH", raw, 56)
    user_sgprs = rsrc2 >> 1 & 31
    expected = {
        "LDS of its own": (lds, 0),
        "scratch": (scratch, 0),
        "float mode, IEEE or clamp": (rsrc1 & ~RSRC1_COUNTS, RSRC1_MODE),
        "SGPRs of the dispatch": (rsrc2 & ~(31 << 1), RSRC2_WORKGROUP_X),
        "properties": (properties, KERNARG_POINTER),
        "a preload that does not start at 0": (preload >> 7, 0),
        "room of the preload": (user_sgprs - 2 - (preload & 127), 0),
        "split workgroups": (rsrc3 & ~0x3F, 0),
    }
    for what, (found, wanted) in expected.items():
        if found != wanted:
            raise Skipped(f"kernel descriptor: {what}: {found:#x} instead of {wanted:#x}")
    return {
        "user_sgprs": user_sgprs,
        "preloaded": preload & 127,
        "argument_bytes": arguments,
        "vgprs": ((rsrc1 & 63) + 1) * 8,
        "accum_offset": ((rsrc3 & 63) + 1) * 4,
    }
