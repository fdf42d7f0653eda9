"""A server as far as its files go: ``python -m tests.status.server_child FOLDER``; its environment names its run.

It says "ready", does what each line of stdin says and answers with a line, until it is killed or stdin ends.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tests.support.statuses import NOTHING, with_layers
from vllm_aiter_mla.startup import first_call
from vllm_aiter_mla.status import metrics, status_files
from vllm_aiter_mla.status.engine_status import EngineStatus

FOLDER = Path(sys.argv[1])
PREFIX = "first-call-x"
ENTERED = ExitStack()


def write(rank: int = 0) -> None:
    status = EngineStatus()
    record = with_layers(status, {"a": NOTHING._replace(ran_kernel="aiter")}, 8, rank=rank, integration="passes")
    status.set_record(replace(record, model_name="m"), 0)
    status.write(FOLDER)


def front_end() -> None:
    status_files.hold_run_lock(FOLDER)
    metrics.register_metrics(FOLDER)


def forked_worker_ends() -> None:
    worker = multiprocessing.get_context("fork").Process(target=write, args=(1,))
    worker.start()
    worker.join()


def spawned_worker_ends() -> None:
    subprocess.run([sys.executable, "-m", __spec__.name, str(FOLDER)], input="write\n", text=True, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip


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


def worker_that_lives_on() -> int:
    """A worker that writes its status and outlives its front end; stop it by its process id."""
    worker = subprocess.Popen([sys.executable, "-m", __spec__.name, str(FOLDER)], text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert worker.stdin
    assert worker.stdout
    print("write\nsleep", file=worker.stdin, flush=True)
    assert [worker.stdout.readline() for _ in range(2)] == ["ready\n", "None\n"]
    return worker.pid


def sleep() -> None:
    time.sleep(600)


def mark() -> None:
    ENTERED.enter_context(first_call.marked(FOLDER, PREFIX))


def unmark() -> None:
    ENTERED.close()


def why_died_before() -> str | None:
    return first_call.why_died_before(FOLDER, PREFIX)


COMMANDS: tuple[Callable[[], object], ...] = (
    write, front_end, forked_worker_ends, spawned_worker_ends, worker_that_lives_on, sleep, fork_that_lives_on,
    mark, unmark, why_died_before, os.abort,
)  # fmt: skip

if __name__ == "__main__":
    known = {command.__name__: command for command in COMMANDS}
    print("ready", flush=True)
    for line in sys.stdin:
        print(known[line.strip()](), flush=True)
