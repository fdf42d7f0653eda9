"""What several servers and ``offline.py`` ask vLLM for beyond its defaults, as JSON: no engine starts.

``python -m tests.examples.recipe_child JSON``, where JSON is a list of command lines of ``vllm serve``.
"""

import dataclasses
import json
import runpy
import sys
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

OFFLINE = Path(__file__).parents[2] / "examples" / "offline.py"


def asked(args: Any, default: Any) -> dict[str, str]:
    """Return the options that differ from vLLM's defaults; an option is vLLM's own object."""
    told = {field.name: (getattr(args, field.name), getattr(default, field.name)) for field in dataclasses.fields(args)}
    return {name: repr(value) for name, (value, usual) in told.items() if repr(value) != repr(usual)}


def served(arguments: list[str]) -> AsyncEngineArgs:
    """Return what ``vllm serve`` with these arguments hands to its engine, by vLLM's own parser of that command.

    Not by ``vllm`` itself, which asks for a distribution of that name; the CPU build has another one.
    """
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(["serve", *arguments])
    args.model = args.model_tag or args.model  # as the command does first
    return AsyncEngineArgs.from_cli_args(args)


if __name__ == "__main__":
    offline = runpy.run_path(str(OFFLINE))["ARGUMENTS"]
    told = {
        "servers": [asked(served(one), served([])) for one in json.loads(sys.argv[1])],
        "offline": asked(EngineArgs(**offline), EngineArgs()),
        "variables": sorted(envs.environment_variables),
    }
    print(json.dumps(told))
