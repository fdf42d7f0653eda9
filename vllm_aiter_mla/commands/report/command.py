"""``vllm-aiter-mla report``: one self-contained HTML page from what the other commands wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT...", help="Folder of `demo --keep`, or JSON of demo, verify, bench, plan, status."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path("report.html"),
) -> None:
    """Draw what the other commands wrote: status, compile ranges, the layer's graph before and after, bench, verify.

    One HTML file without scripts, fonts or images from elsewhere; it opens without a network and on a phone. Every
    figure is also in a table. Exits 2 when an input cannot be shown, and writes nothing then.
    """
    from vllm_aiter_mla import files
    from vllm_aiter_mla.commands import outputs
    from vllm_aiter_mla.commands.printable import line
    from vllm_aiter_mla.commands.report.inputs import InputError
    from vllm_aiter_mla.commands.report.render import NoTemplateEngineError, html_of

    try:
        outputs.check({"--out": out})
        page = html_of(inputs)
        files.write_text(out, page)
    except (InputError, NoTemplateEngineError, outputs.OutputError) as error:
        typer.echo(line(f"report: {error}"), err=True)
        raise typer.Exit(2) from error
    except OSError as error:
        typer.echo(line(f"report: {out}: {error.strerror or error}"), err=True)
        raise typer.Exit(2) from error
    typer.echo(line(f"report written to {out} ({len(page.encode()) // 1024} KiB, opens without a network)"))
