"""``make demo``, or ``python -m tests.sandbox``: the vLLM engine with the fast path off and on, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", min=1, max=2, help="Workers: 1 or 2.")
    ] = 1,
    full: Annotated[bool, typer.Option("--full", help="All scenarios and numerics, four layers.")] = False,
    kernel: Annotated[str, typer.Option(help="reference, simulated-aiter or triton (needs a GPU).")] = "reference",
    arch: Annotated[
        str | None, typer.Option(help="Card that --kernel simulated-aiter imitates: gfx942 (default) or gfx950.")
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(help="Attention under --kernel simulated-aiter: aiter (vLLM's own, default) or sandbox."),
    ] = None,
    integration: Annotated[str, typer.Option(help="passes, or module: both sides in eager mode.")] = "passes",
    keep: Annotated[Path | None, typer.Option(help="Keep FX graphs and results in this folder, for `report`.")] = None,
) -> None:
    """Serve a small random DeepSeek-V2 with vLLM, fast path off and on, and compare: on this CPU, or on a GPU.

    Prints which layers engaged, what is left of each layer's graph, and per scenario whether the tokens are equal and
    how far the log-probabilities are apart. Exits 1 when a bound is missed. It starts four engines, flag off and on
    over a bf16 and an fp8 cache, two at a time; --full starts six, which do more. --integration module runs in eager
    mode, where no graph is compiled and the plugin replaces the forward of vLLM's MLA wrapper. --kernel simulated-aiter
    runs vLLM's own AITER attention classes over stand-ins for their kernels. On a CPU nothing is said about a GPU;
    --kernel triton runs on the GPU that torch sees, under vLLM's own platform and its Triton MLA back end, graphs
    captured, and says why not where there is none.
    """
    from tests.sandbox.runs import Options, why_not
    from vllm_aiter_mla.commands import outputs

    try:
        outputs.check({"--json": json}, {"--keep": keep})
    except outputs.OutputError as error:
        raise typer.Exit(_wrong(f"demo: {error}")) from None
    for name, value in (("--arch", arch), ("--attention", attention)):
        if value is not None and kernel != "simulated-aiter":
            raise typer.Exit(_wrong(f"demo: {name} {value}: only with --kernel simulated-aiter; --kernel is {kernel}"))
    options = Options(
        json, tensor_parallel_size, full, kernel, arch or "gfx942", attention or "aiter", integration, keep
    )
    # Asked here, although the run asks again: there it would be printed among the figures.
    problem = why_not(options)
    if problem is not None:
        raise typer.Exit(_wrong(problem))
    from tests.sandbox import demo as run

    raise typer.Exit(run.main(options))


def _wrong(message: str) -> int:
    typer.echo(message, err=True)
    return 2


if __name__ == "__main__":
    typer.run(demo)
