# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla report``: one HTML page from the files of other commands. It loads nothing and runs no script.

``page`` reads the files. ``check_reader``, ``engine_reader`` and ``serving_reader`` say what the page shows of each
kind, as ``blocks``. ``charts`` draws, ``page.html.j2`` holds the markup and the CSS. ``serving_record`` is what
``tools/serving.py`` writes.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from vllm_aiter_mla import files, packages
from vllm_aiter_mla.commands import outputs


def report(
    inputs: Annotated[
        list[Path],
        typer.Argument(metavar="INPUT...", help="JSON of check, a status file, or a folder of them."),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", callback=outputs.writable, help="File to write; - for stdout.")
    ] = Path("report.html"),
) -> None:
    """Draw one HTML page from what the other commands wrote.

    The page loads nothing, runs no script and opens without a network. Every figure is in a table too. Exit status: 2,
    with nothing written, if an input cannot be shown; else 0.
    """
    try:
        text = renderer()(inputs)
    except ValueError as error:
        outputs.fail(f"report: {error}")
    except OSError as error:
        outputs.fail(f"report: {error.filename}: {error.strerror or error}")
    outputs.write("report", out, text)
    # The page may have gone to stdout.
    done = f"report written to {out} ({len(text.encode()) // 1024} KiB)"
    typer.echo(outputs.one_line(done), err=out == outputs.STDOUT or files.is_device(out))


def renderer() -> Callable[[Sequence[Path]], str]:
    """Return ``page.html_of``.

    Raises:
        ValueError: jinja2, matplotlib or what they need is not installed, or is here and cannot be imported.
    """
    try:
        from vllm_aiter_mla.commands.report.page import html_of
    except Exception as error:  # a package that was built for another numpy may raise anything
        absent = packages.missing_package(error)
        if absent is not None:
            raise ValueError(f"{absent} is not installed; in a checkout: pip install '.[report]'") from error
        held = " and ".join(packages.installed_distribution(name) or name for name in ("jinja2", "matplotlib"))
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"{held} are here and cannot be imported: {problem}; in a checkout: pip install --upgrade '.[report]'"
        ) from error
    return html_of
