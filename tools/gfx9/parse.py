"""The assembly of one kernel as a list of instructions. What it cannot read is refused with its line."""

from __future__ import annotations

import re
from dataclasses import dataclass

# They place no code and change no instruction; .p2align fills with s_nop.
SILENT = re.compile(r"\.(loc|file|cfi_\w+|p2align|globl|type|size)\b")
SUFFIX = re.compile(r"_(e32|e64|sdwa|dpp)$")
# The operand is one expression, with blanks inside.
WHOLE = ("s_waitcnt", "s_nop")


class Skipped(Exception):  # noqa: N818
    """The code holds something that is not modelled: a mnemonic, a modifier, an operand, a mode bit."""


class Fault(Exception):  # noqa: N818
    """The code did something wrong while it ran: a bad address, an undefined value, a missing wait, a race."""


@dataclass(frozen=True)
class Instruction:
    """One instruction."""

    name: str  # mnemonic without its encoding
    encoding: str  # "e32", "e64", "sdwa", "dpp" or ""
    operands: tuple[str, ...]  # as written
    modifiers: dict[str, str]  # what follows the operands: name to value, "" for a bare word
    line: int  # number in the listing, from 1
    text: str  # as written, without the comment

    def refuse(self, why: str) -> Skipped:
        """The error that names this line."""
        return Skipped(f"line {self.line}: {self.text}: {why}")

    def only(self, *allowed: str) -> None:
        """Refuse every modifier but ``allowed``."""
        for name in self.modifiers:
            if name not in allowed:
                raise self.refuse(f"the modifier {name} is not modelled")

    def number(self, modifier: str) -> int:
        """A modifier's value, 0 where it is absent."""
        return int(self.modifiers.get(modifier, "0"), 0)

    def flags(self, modifier: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """A modifier like ``op_sel:[0,1]``."""
        text = self.modifiers.get(modifier)
        found = tuple(int(x) for x in text.strip("[]").split(",")) if text else default
        if len(found) != len(default):
            raise self.refuse(f"{modifier} with {len(default)} entries expected")
        return found


@dataclass(frozen=True)
class Listing:
    """A kernel's instructions; ``labels`` maps a label to the index of the instruction it stands before."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    # Where a dispatch enters whose kernel arguments the hardware has loaded into registers.
    preloaded_entry: int


def parse(text: str) -> Listing:
    """The one kernel of an amdgcn listing.

    Raises:
        Skipped: a line is neither an instruction nor known to place no code.
    """
    found = re.search(r"^\s*\.amdhsa_kernel\s+(\w+)", text, re.MULTILINE)
    if found is None:
        raise Skipped("the listing holds no kernel")
    name = found.group(1)
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    aligned: list[int] = []
    inside = False
    for number, raw in enumerate(text.split("\n"), 1):
        line = re.sub(r"(;|//).*", "", raw).strip()
        label = re.fullmatch(r"([.\w$]+):", line)
        if label:
            inside = inside or label.group(1) == name
            labels[label.group(1)] = len(instructions)
        elif inside and line.startswith(".section"):
            break
        elif inside and line.startswith("."):
            if not SILENT.match(line):
                raise Skipped(f"line {number}: {line}: the directive is not modelled")
            if line.startswith(".p2align\t8") or line.startswith(".p2align 8"):
                aligned.append(len(instructions))
        elif inside and line:
            instructions.append(instruction(line, number))
    if not instructions:
        raise Skipped(f"no instruction of {name}")
    return Listing(name, tuple(instructions), labels, aligned[0] if aligned else 0)


def instruction(line: str, number: int = 0) -> Instruction:
    mnemonic, _, rest = line.partition(" ") if " " in line else line.partition("\t")
    found = SUFFIX.search(mnemonic)
    encoding = found.group(1) if found else ""
    name = mnemonic[: found.start()] if found else mnemonic
    parts = [rest.strip()] if name in WHOLE else split(rest)
    words: list[str] = []
    if parts[-1] and name not in WHOLE:
        last, *words = parts[-1].split() if "(" not in parts[-1] else [parts[-1]]
        parts[-1] = last
    modifiers = {}
    for word in words:
        key, _, value = word.partition(":")
        if key in modifiers:
            raise Skipped(f"line {number}: {line}: {key} twice")
        modifiers[key] = value
    return Instruction(name, encoding, tuple(p for p in parts if p), modifiers, number, line)


def split(text: str) -> list[str]:
    """Operands, separated by the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    parts.append(text[start:].strip())
    return parts
