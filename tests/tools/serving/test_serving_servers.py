"""Claims about servers: their death is reported, and none is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.benchmarks.sweep import server

from tests.tools.serving.serving_runs import bench_run, gone, soon_gone
from tools.serving import sweep
from tools.serving.proof import get


def test_a_server_s_early_death_shows_its_status_and_log_file(
    fakes: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.set(server="dies")
    assert bench_run(fakes) == 1
    said = capsys.readouterr().err
    assert "crashed with return code 1" in said
    assert "--start-timeout" not in said
    assert "server-on.log" in said


def test_a_server_that_never_answers_is_stopped(
    fakes: SimpleNamespace, servers: list[subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.set(server="hangs")
    assert bench_run(fakes, "--start-timeout", "1") == 1
    assert "failed to become ready within 1 seconds. (--start-timeout)" in capsys.readouterr().err
    assert [soon_gone(process.pid) for process in servers] == [True]


def test_workers_that_ignore_the_end_are_killed(fakes: SimpleNamespace) -> None:
    fakes.set(server="leaves-worker")
    assert bench_run(fakes) == 0
    workers = [call["worker"] for call in fakes.calls() if "worker" in call]
    assert len(workers) == 2
    assert all(soon_gone(pid) for pid in workers)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The servers that vLLM's sweep has started, known before they have said a word."""
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(server.subprocess, "Popen", Noted)
    return started


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler: a run in the background of a shell inherits a SIGINT that is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interruption_stops_the_server(
    fakes: SimpleNamespace,
    servers: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The sweep sleeps where it waits for the server.
    monkeypatch.setattr(server.time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGINT))
    fakes.set(server="hangs")
    assert bench_run(fakes) == 130
    assert "what was started is stopped" in capsys.readouterr().err
    assert [soon_gone(process.pid) for process in servers] == [True]


def test_servers_that_run_already_are_used_and_left_running(fakes: SimpleNamespace, free_ports: list[str]) -> None:
    sides = [["--port", port] for port in free_ports]
    sides[1] += ["--additional-config", '{"aiter_mla": {"enabled": true}}']
    started = [subprocess.Popen([*sweep.SERVER, "MODEL", *side]) for side in sides]
    urls = [f"http://127.0.0.1:{port}" for port in free_ports]
    try:
        deadline = time.monotonic() + 60
        while any(get(f"{url}/health") is None for url in urls) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert all(get(f"{url}/health") is not None for url in urls), "a fake server never came"
        assert bench_run(fakes, "--off-url", urls[0], "--on-url", urls[1]) == 0
        assert all(process.poll() is None for process in started)
    finally:
        for process in started:
            process.kill()
            process.wait()
    page = fakes.out.read_text()
    assert "4/4 MLA layers engaged (by /metrics)" in page
    assert "they were started by somebody else" in page


@pytest.fixture
def free_ports() -> list[str]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return [str(probe.getsockname()[1]) for probe in (one, other)]


def test_workers_of_a_server_that_died_are_killed(fakes: SimpleNamespace) -> None:
    fakes.set(server="dies-with-worker")
    assert bench_run(fakes) == 1
    (worker,) = [call["worker"] for call in fakes.calls("worker")]
    assert soon_gone(worker)


@pytest.mark.mutation
def test_workers_that_are_left_are_caught(fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_end_server", lambda folder: None)
    monkeypatch.setitem(globals(), "soon_gone", gone)
    try:
        with pytest.raises(AssertionError):
            test_workers_of_a_server_that_died_are_killed(fakes)
    finally:
        for call in fakes.calls("worker"):
            os.kill(call["worker"], signal.SIGKILL)
