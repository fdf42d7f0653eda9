"""AITER's Triton GEMMs by name: where they are, and why one cannot be called here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

import torch

Function = Callable[..., torch.Tensor]

# Where vLLM imports them from, and where AITER's sources hold them since they were sorted into folders.
HOMES = ("aiter.ops.triton", "aiter.ops.triton.gemm.batched")


class AiterGemm:
    """A function of AITER's in a module of the same name; imported at the first use and kept.

    Args:
        name: of the function and of its module.
        kind: of its weights, for the message.
    """

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.kind = kind
        self.found: Function | None = None

    def missing(self) -> str | None:
        """Why it cannot be called in this process, or None. Never raises."""
        if self.found is None:
            found = self.load()
            if isinstance(found, str):
                return found
            self.found = found
        return None

    def load(self) -> Function | str:
        """The function, looked up anew, or why there is none. Never raises."""
        problems = []
        for home in HOMES:
            try:
                return cast(Function, getattr(importlib.import_module(f"{home}.{self.name}"), self.name))
            except Exception as error:  # its modules look at the card and at Triton when imported
                problems.append(f"{type(error).__name__}: {error}")
        return f"AITER's {self.kind} batched GEMM cannot be imported: {problems[-1]}"

    def __call__(self, *operands: Any, **options: Any) -> torch.Tensor:
        """Call it.

        Raises:
            RuntimeError: it is missing; the message says why.
        """
        if (reason := self.missing()) is not None or self.found is None:
            raise RuntimeError(reason)
        return self.found(*operands, **options)
