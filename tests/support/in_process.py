"""What a step would call in a process of its own, called in this one, where a test has made something up."""

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from vllm_aiter_mla.commands import process

ENDED = process.EndedError("was ended by SIGABRT", "a check of a kernel's failed")
"""How a call ends that ``install`` ends."""
NONE: Mapping[str, int] = MappingProxyType({})


class _End(BaseException):
    """The process is gone: what runs in it catches nothing."""


def install(
    monkeypatch: pytest.MonkeyPatch,
    noted: Callable[[str, Mapping[str, str]], None] = lambda name, environment: None,
    ends: Mapping[str, int] = NONE,
) -> None:
    """Replace ``process.call``.

    Args:
        monkeypatch: of the test.
        noted: gets ``process.import_path_of`` each function that is called, and its variables.
        ends: names of functions whose first call ends by ``ENDED`` once it has told so many values; 0: before it
            begins.
    """
    left = dict(ends)

    def call(
        function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] = os.environ,
        log_descriptor: int | None = None, on_value: Callable[[Any], None] = lambda value: None,
        expected_errors: tuple[type[Exception], ...] = (),
    ) -> Any:  # fmt: skip
        name = process.import_path_of(function)
        noted(name, environment)
        most, told = left.pop(name, None), 0

        def hear(value: Any) -> None:
            nonlocal told
            on_value(value)
            told += 1
            if told == most:
                raise _End

        if most == 0:
            raise ENDED
        process._value_listeners.append(hear)
        try:
            returned = function(*arguments)
        except _End:
            raise ENDED from None
        finally:
            process._value_listeners.remove(hear)
        assert most is None, f"{name} told {told} values and returned: nothing ended it after {most}"
        return returned

    monkeypatch.setattr(process, "call", call)
