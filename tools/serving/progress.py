"""What a run is doing, on stderr: a line per step, and a spinner under the last one on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Gives a function that shows one line."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with console.status("") as status:

        def say(text: str) -> None:
            console.print(Text(text))
            status.update("")

        yield say
