"""Write docs/generated/: the help of every command, and what a layer launches and moves.

    python tools/docs.py [--check]

With --check nothing is written, and the exit status is 1 if a page is not up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import typer.main

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import ledger
from tools.common import Parser
from vllm_aiter_mla.commands.main import app

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "generated"
WIDTH = 100
HEAD = "Written by `make docs`.\n"


def commands() -> str:
    """Return the page of commands: their help at a fixed width, without colours."""
    found = ["# Commands\n", HEAD]
    for name, command in sorted(typer.main.get_command(app).commands.items()):  # type: ignore[attr-defined]
        command.rich_markup_mode = None
        context = click.Context(command, info_name=f"vllm-aiter-mla {name}", terminal_width=WIDTH)
        lines = (line.rstrip() for line in command.get_help(context).splitlines())
        found += [f"## {name}\n", "```text", *lines, "```\n"]
    return "\n".join(found)


def launches() -> str:
    """Return the page of the ledger."""
    said = "[What a batch costs](../evidence.md#what-a-batch-costs) says what is counted, and how.\n"
    return "\n".join(["# Launches, allocations and bytes\n", HEAD, said, ledger.render(ledger.count_all()), ""])


PAGES: dict[str, Callable[[], str]] = {"commands.md": commands, "ledger.md": launches}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or compare them."""
    parser = Parser(__doc__, "docs.py [--check]")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not up to date")
    check, stale = parser.parse_args(argv).check, []
    for name, page in PAGES.items():
        path, text = FOLDER / name, page()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.write_text(text, encoding="utf-8")
    print(f"docs/generated: {', '.join(stale) or 'nothing'} {'is not up to date' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
