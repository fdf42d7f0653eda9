"""Failures to plant, and the log lines that tell of them."""

from collections.abc import Callable
from typing import Any


class Said(list[tuple[int, str]]):
    """Log lines as (level, text); the fixture ``said`` collects them."""

    def at(self, level: int) -> list[str]:
        """The lines of one level."""
        return [text for given, text in self if given == level]


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises ``error`` whatever it is given."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail
