# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla report``: render one HTML page from the files of other commands.

``page`` reads the files. ``check_reader``, ``plan_reader``, ``status_reader`` and ``serving_reader`` add each kind of
record to the page as ``blocks`` and ``tables``. ``charts`` draws, and ``page.html.j2`` has the markup and the CSS.
``serving_record`` is the record of ``tools/serving.py``.
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
        Path, typer.Option("--out", "-o", callback=outputs.check_writable, help="File to write; - for stdout.")
    ] = Path("report.html"),
) -> None:
    """Draw one HTML page from the files of the other commands.

    The page loads nothing, runs no script and opens without a network. Every figure is also in a table. Exit status 0:
    the page is written. 2: an input cannot be shown, and nothing is written.
    """
    if (reason := outputs.overwritten_input_reason(inputs, out)) is not None:
        outputs.fail(f"report: --out {out}: {reason}")
    try:
        text = load_renderer()(inputs)
    except ValueError as error:
        outputs.fail(f"report: {error}")
    except OSError as error:
        outputs.fail(f"report: {error.filename}: {error.strerror or error}")
    outputs.write_output("report", out, text)
    # The page itself may be on stdout.
    message = f"report written to {out} ({len(text.encode()) // 1024} KiB)"
    typer.echo(outputs.one_line(message), err=out == outputs.STDOUT or files.is_stream(out))


def load_renderer() -> Callable[[Sequence[Path]], str]:
    """Return ``page.render_page``.

    Raises:
        ValueError: jinja2, matplotlib or a package that they need is not installed or cannot be imported.
    """
    try:
        from vllm_aiter_mla.commands.report.page import render_page
    except Exception as error:  # a package built for another numpy may raise anything
        missing_package = packages.missing_package(error)
        if missing_package is not None:
            raise ValueError(f"{missing_package} is not installed; in a checkout: pip install '.[report]'") from error
        package_names = " and ".join(packages.installed_distribution(name) or name for name in ("jinja2", "matplotlib"))
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"{package_names} are installed and cannot be imported: {problem}; in a checkout: pip install --upgrade "
            "'.[report]'"
        ) from error
    return render_page
