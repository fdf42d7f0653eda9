"""Failures to plant, and the log lines that tell of them."""

import sys
from collections.abc import Callable
from typing import Any

import pytest


class Said(list[tuple[int, str]]):
    """Log lines as (level, text); the fixture ``said`` collects them."""

    def at(self, level: int) -> list[str]:
        return [text for given, text in self if given == level]


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def break_import(monkeypatch: pytest.MonkeyPatch, package: str, error: Exception) -> None:
    """Let every import of ``package`` raise ``error``, as if it were absent, or here and broken."""

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            if name == package:
                raise error

    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
