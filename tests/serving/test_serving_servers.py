"""Claims about servers: their death is reported, and none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from serving import server
from serving.errors import ServingError
from serving_runs import bench_run, gone


def test_a_server_s_early_death_shows_its_status_and_log_file(
    fakes: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.set(server="dies")
    assert bench_run(fakes) == 1
    said = capsys.readouterr().err
    assert "the on-arm's server ended with status 1" in said
    assert str(fakes.work / "server-on-1.log") in said


def test_a_server_that_never_answers_is_stopped(fakes: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.set(server="hangs")
    assert bench_run(fakes, "--start-timeout", "0.5") == 1
    assert "did not answer within 0.5 s (--start-timeout)" in capsys.readouterr().err
    assert gone(fakes.calls()[0]["pid"])


def test_workers_that_ignore_the_end_are_killed(fakes: SimpleNamespace) -> None:
    fakes.set(server="leaves-worker")
    assert bench_run(fakes, "--servers", "per-arm") == 0
    workers = [call["worker"] for call in fakes.calls() if "worker" in call]
    time.sleep(0.2)
    assert len(workers) == 2
    assert all(gone(pid) for pid in workers)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler: a run in the background of a shell inherits a SIGINT that is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interruption_stops_the_server(fakes: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.set(server="hangs")
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    assert bench_run(fakes) == 130
    assert "servers stopped" in capsys.readouterr().err
    assert gone(fakes.calls()[0]["pid"])


def test_servers_that_run_already_are_used_and_left_running(fakes: SimpleNamespace, tmp_path: Path) -> None:
    arms = [["--port", str(server.free_port())] for _ in range(2)]
    arms[1] += ["--additional-config", '{"aiter_mla": {"enabled": true}}']
    started = [subprocess.Popen([*server.LAUNCH, *arm]) for arm in arms]
    urls = [f"http://127.0.0.1:{arm[1]}" for arm in arms]
    try:
        deadline = time.monotonic() + 10
        while any(server.get(f"{url}/health") is None for url in urls) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert bench_run(fakes, "--off-url", urls[0], "--on-url", urls[1]) == 0
        assert all(process.poll() is None for process in started)
    finally:
        for process in started:
            process.kill()
            process.wait()
    page = fakes.out.read_text()
    assert "4/4 MLA layers engaged (by /metrics)" in page
    assert "they were started by somebody else" in page


def test_a_url_that_does_not_answer_is_reported() -> None:
    with pytest.raises(ServingError, match="does not answer"), server.Running(f"http://127.0.0.1:{server.free_port()}"):
        pass


@pytest.mark.mutation
def test_a_group_that_is_not_killed_is_caught(fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_signal", lambda group, number: os.kill(group, number) if number != 9 else None)
    try:
        with pytest.raises(AssertionError):
            test_workers_that_ignore_the_end_are_killed(fakes)
    finally:
        for call in fakes.calls():
            if "worker" in call:
                os.kill(call["worker"], signal.SIGKILL)
