"""What stops the interpreter."""

from __future__ import annotations


class Skipped(Exception):  # noqa: N818
    """The code holds something that is not modelled: a mnemonic, a modifier, an operand, a mode bit."""


class Fault(Exception):  # noqa: N818
    """The code did something wrong while it ran: a bad address, an undefined value, a missing wait, a race."""
