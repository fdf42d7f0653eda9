"""What a step would call in a process of its own, called in this one, where a test has made something up."""

import os
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from vllm_aiter_mla.commands import process


def install(
    monkeypatch: pytest.MonkeyPatch, noted: Callable[[str, Mapping[str, str]], None] = lambda name, environment: None
) -> None:
    """Replace ``process.call``; ``noted`` gets the name of each function that is called, and its variables."""

    def call(
        function: str, *arguments: Any, environment: Mapping[str, str] = os.environ, log: int | None = None,
        heard: Callable[[Any], None] = lambda value: None,
    ) -> Any:  # fmt: skip
        noted(function, environment)
        process._telling.append(heard)
        try:
            return pkgutil.resolve_name(function)(*arguments)
        finally:
            process._telling.remove(heard)

    monkeypatch.setattr(process, "call", call)
