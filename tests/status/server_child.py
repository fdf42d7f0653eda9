"""A server as far as its files go, or one of its workers: ``serve`` in a process of ``FORKS``.

``python -m tests.status.server_child FOLDER`` is a worker that was spawned, whose environment names the run: it does
what each line of stdin says.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from tests.support.statuses import NOTHING, with_layers
from vllm_aiter_mla.startup import first_call
from vllm_aiter_mla.status import liveness, metrics
from vllm_aiter_mla.status.engine_status import EngineStatus

FOLDER = Path()  # set by ``serve``, or from the command line
PREFIX = "first-call-x"
NAME = "tests.status.server_child"
# Forks of a process that has imported this module, and no more: a new process in a tenth of the time.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([NAME])
ENTERED = ExitStack()


def write(rank: int = 0) -> None:
    status = EngineStatus()
    record = with_layers(status, {"a": NOTHING._replace(ran_kernel="aiter")}, 8, rank=rank, integration="passes")
    status.set_record(replace(record, model_name="m", engine_id=f"{os.getpid()}"))
    status.write(FOLDER)


def front_end() -> None:
    liveness.ensure_run_lock(FOLDER)
    metrics.register_metrics(FOLDER)


def forked_worker_ends() -> None:
    worker = multiprocessing.get_context("fork").Process(target=write, args=(1,))
    worker.start()
    worker.join()


def spawned_worker_ends() -> None:
    subprocess.run([sys.executable, "-m", NAME, str(FOLDER)], input="write\n", text=True, check=True)


def fork_that_lives_on() -> int:
    """As a worker, or a pool of a compiler, that outlives the process which is killed."""
    runs, told = os.pipe()
    child = os.fork()
    if not child:
        os.write(told, b".")  # what follows a fork, such as letting go of locks, is done
        time.sleep(600)
        os._exit(0)
    os.read(runs, 1)
    return child


def mark() -> None:
    ENTERED.enter_context(first_call.first_call_marker(FOLDER, PREFIX))


def unmark() -> None:
    ENTERED.close()


def why_died_before() -> str | None:
    return first_call.earlier_death_reason(FOLDER, PREFIX)


COMMANDS: tuple[Callable[[], object], ...] = (
    write, front_end, forked_worker_ends, spawned_worker_ends, fork_that_lives_on, mark, unmark, why_died_before,
    os.abort,
)  # fmt: skip

KNOWN = {command.__name__: command for command in COMMANDS}


def serve(folder: Path, run: str, connection: Connection) -> None:
    """Do each command that arrives and answer with its result's text, until this process is killed."""
    global FOLDER
    FOLDER, os.environ[liveness.RUN_VARIABLE] = folder, run
    while True:
        connection.send(str(KNOWN[connection.recv()]()))


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    for line in sys.stdin:
        KNOWN[line.strip()]()
