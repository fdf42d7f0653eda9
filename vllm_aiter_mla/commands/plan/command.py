"""``vllm-aiter-mla plan``: a dry run on a model's config and the options of ``vllm serve``."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Any

import typer

from vllm_aiter_mla.commands import outputs
from vllm_aiter_mla.commands.outputs import line

# typer passes on the options it does not know: vLLM's own parser reads them.
COMMAND: dict[str, Any] = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}
ENGAGES, DOES_NOT, WRONG = 0, 1, 2


class Arch(str, Enum):
    """Cards a plan can be made for."""

    gfx942 = "gfx942"
    gfx950 = "gfx950"
    sm90 = "sm90"


def plan(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Folder or file of a config, a bundled example, or a cached hub name."),
    ],
    arch: Annotated[Arch, typer.Option(help="Card to plan for.")] = Arch.gfx942,
    env: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE: one of vLLM's environment variables; may be repeated.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say what would engage: MODEL first, then the options of `vllm serve`.

    Prints heads per rank, the decode limit, compile ranges, capture sizes, the kernel by batch size, every reason
    against, and bytes and launches by formula. What vLLM decides, vLLM is asked. Needs no GPU, no weights and no
    network. Exits 0 when the layers would engage, 1 when not, 2 when an option or the model is wrong, or it is not
    known.
    """
    with outputs.progress("plan") as at:
        raise typer.Exit(main(model, context.args, arch.value, env or [], as_json=json, at=at))


def main(
    name: str,
    arguments: Sequence[str],
    arch: str,
    env: Sequence[str],
    *,
    as_json: bool = False,
    at: outputs.Step = outputs.silent,
) -> int:
    """Plan ``name`` with the options of ``vllm serve`` in ``arguments``; ``at`` is told of every longer step.

    Returns:
        0 when the layers would engage, 1 when not, 2 when the model or an option is wrong, or it is not known.
    """
    # vLLM logs to stdout, where the plan goes.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    at("importing vLLM")
    from vllm_aiter_mla import files
    from vllm_aiter_mla.commands.plan import build, model, printout, serve_options
    from vllm_aiter_mla.compat.offline import VllmMissingError
    from vllm_aiter_mla.compat.offline_model import NotKnownError

    try:
        _check_model_comes_first(name, arguments)
        source = model.find(name)
        at("reading the options with vLLM's parser")
        options = serve_options.read(arguments, name, arch, serve_options.environment(env))
        at("building the model without weights")
        record = build.build(options, model.facts(source, options))
    except (model.ModelNotFoundError, ValueError, VllmMissingError) as error:
        return _wrong(str(error))
    except NotKnownError as error:
        return _wrong(f"not known, vLLM could not be asked about {name} here: {error}")
    print(json_module.dumps(record | files.stamp("plan", 1), indent=1) if as_json else printout.text(record))
    if record["outcome"] == build.UNKNOWN:
        return WRONG
    return ENGAGES if record["outcome"] == build.ENGAGED else DOES_NOT


def _wrong(sentence: str) -> int:
    print(f"plan: {line(sentence)}", file=sys.stderr)
    return WRONG


def _check_model_comes_first(name: str, arguments: Sequence[str]) -> None:
    """Raise ValueError where MODEL is an option, as it is when options come first, or where a second one is named."""
    if name.startswith("-"):
        raise ValueError(f"{name} in the place of MODEL: MODEL comes first, then the options of `vllm serve`")
    for index, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option == "--model":
            other = value if equals else next(iter(arguments[index + 1 : index + 2]), "")
            raise ValueError(f"--model {other} beside MODEL {name}: give the model once, as MODEL")
