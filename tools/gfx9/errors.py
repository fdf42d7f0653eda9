"""What stops the interpreter."""

from __future__ import annotations


class Refused(Exception):
    """The code holds something that is not modelled: a mnemonic, a modifier, an operand, a mode bit."""


class Fault(Exception):
    """The code did something wrong while it ran: a bad address, an undefined value, a missing wait, a race."""
