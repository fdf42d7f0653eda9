"""Keep AITER from being imported: its import wants a card, runs rocminfo and may start a compiler.

vLLM itself may try, in whatever release. Inside the guard AITER can be found, and its files read, but importing it
raises ``ImportError``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = "aiter"


@contextmanager
def aiter_not_importable() -> Iterator[None]:
    """Refuse ``import aiter`` while inside; a process that has imported it before keeps it."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Skip()
                return spec
        return None


class _Skip(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        raise ImportError(f"doctor does not import {spec.name}: that may start a compiler", name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        raise ImportError("never reached")
