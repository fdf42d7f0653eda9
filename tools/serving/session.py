"""One comparison: servers in the order of the schedule, each proved to be what its arm is called, then measured."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from serving import engaged, small
from serving.arms import OFF, Arm
from serving.errors import ServingError, UsageError
from serving.schedule import PER_ARM, Visit, visits
from serving.server import LAST_LINES, Running, Started, answers, environment_of_clients


@dataclass
class Session:
    """What the servers said of themselves.

    Attributes:
        model: as the servers and clients are given it.
        census: of the on-arm, one line per start; the last counts.
        baseline: what the off-arm's log says of vLLM's own pass.
        versions: vLLM's version by arm, as the servers give it.
        gauges: the plugin's gauge by arm, empty where it is absent.
        starts: seconds until a server served, by arm.
    """

    model: str
    given: argparse.Namespace
    work: Path
    census: str = ""
    baseline: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    gauges: dict[str, dict[str, int]] = field(default_factory=dict)
    starts: dict[str, list[float]] = field(default_factory=dict)

    def run(self, measure: Callable[[Running, Visit], None], say: Callable[[str], None]) -> None:
        """Visit each arm as scheduled and call ``measure`` with the server and the visit.

        Raises:
            ServingError: a server failed, or an arm is not what it is called.
        """
        by_name = {arm.name: arm for arm in self.given.arms}
        order = visits(self.given.runs, self.given.servers)
        for number, visit in enumerate(order, 1):
            runs = ", ".join(str(run + 1) for run in visit.runs)
            say(f"[{number}/{len(order)}] {visit.arm}, run {runs}: waiting for the server")
            began = time.monotonic()
            with self._server(by_name[visit.arm], visit) as server:
                self.starts.setdefault(visit.arm, []).append(round(time.monotonic() - began, 1))
                self.prove(visit.arm, server)
                say(f"[{number}/{len(order)}] {visit.arm}, run {runs}: measuring")
                measure(server, visit)

    def prove(self, arm: str, server: Running) -> None:
        """Note what the server is, and refuse one that is not what its arm is called."""
        log, metrics = server.log, server.metrics
        self.gauges[arm] = engaged.gauge(metrics)
        if arm == OFF:
            engaged.check_off(log, metrics)
            self.baseline = engaged.check_baseline(log, self.given.baseline)
        else:
            self.census = engaged.check_on(log, metrics)
        self.versions[arm] = server.version
        if len(set(self.versions.values())) > 1:
            raise ServingError(f"the arms run different versions of vLLM: {self.versions}")

    def _server(self, arm: Arm, visit: Visit) -> Running:
        if arm.url is not None:
            return Running(arm.url)
        which = "" if self.given.servers == PER_ARM else f"-{visit.runs[0] + 1}"
        environment = small.environment(self.work) if self.given.small_model else dict(os.environ)
        log = self.work / f"server-{arm.name}{which}.log"
        return Started(self.model, arm, log, environment | arm.environment, self.given.start_timeout)

    def as_record(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "model": self.model,
            "arms": {arm.name: asdict(arm) for arm in self.given.arms},
            "servers": self.given.servers,
            "baseline": self.given.baseline,
            "baseline_in_log": self.baseline,
            "census": self.census,
            "gauges": self.gauges,
            "start_seconds": self.starts,
            "vllm_by_server": self.versions,
        }


def prepare(given: argparse.Namespace, work: Path) -> Session:
    """A session; with ``--small-model`` its model is written to disk.

    Raises:
        UsageError: the small model needs a package that is missing, or a server that was said to run does not answer:
            the second one's absence must not come out after the first was measured.
    """
    for arm in given.arms:
        if arm.url is not None and not answers(arm.url):
            raise UsageError(f"--{arm.name}-url {arm.url}: its /health does not answer")
    model = str(small.save(work / "model")) if given.small_model else given.model
    return Session(model, given, work)


def client(command: Sequence[str], log: Path, timeout_s: float, extra: dict[str, str] | None = None) -> None:
    """Run a client's process to its end; its output is kept in ``log``.

    Raises:
        ServingError: it failed or took too long, with its last lines.
    """
    with log.open("wb") as out:
        try:
            done = subprocess.run(
                list(command),
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment_of_clients() | (extra or {}),
                timeout=timeout_s,
                check=False,
            )
            status = f"ended with status {done.returncode}"
        except subprocess.TimeoutExpired:
            done, status = None, f"took more than {timeout_s:g} s (--client-timeout)"
    if done is None or done.returncode:
        lines = "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-LAST_LINES:])
        raise ServingError(f"the client {status}; its last lines:\n{lines}\nall of it: {log}")


def read_result(path: Path) -> dict[str, Any]:
    """What a client has saved.

    Raises:
        ServingError: it left nothing readable.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ServingError(f"the client left no result in {path}: {error}") from error
