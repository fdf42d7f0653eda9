"""Cases with the Triton back end under Triton's interpreter, in a process of their own.

A process that interprets kernels cannot compile them, and has to be told before Triton is imported. The parent sends
one JSON request on standard input and reads one JSON line per result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# A launch lasts milliseconds here: the long runs are short ones.
SOAK = 8
ROOT = Path(__file__).resolve().parents[2]


def run(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run cases in an interpreting process; yields each result as ``Result.as_dict`` makes it.

    Args:
        request: {"cases": names, "variants": names, "limit": L, "seed": seed}.

    Raises:
        RuntimeError: the process ended without finishing; the message holds its last line.
    """
    environment = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    command = [sys.executable, "-m", "vllm_aiter_mla.verify.interpreted"]
    pipe = subprocess.PIPE
    # A file takes whatever the child complains of; a second pipe would fill up while the first is read, and stop both.
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=complaints, text=True, env=environment) as worker,
    ):
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(json.dumps(request) + "\n")
        worker.stdin.close()
        for line in worker.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        if worker.wait() != 0:
            complaints.seek(0)
            said = complaints.read().strip().splitlines()
            raise RuntimeError(f"the interpreting process ended with status {worker.returncode}: {(said or [''])[-1]}")


def main() -> None:
    """The child: answer one request."""
    import torch

    from vllm_aiter_mla.kernels.triton import interpreter
    from vllm_aiter_mla.verify import backends, cases, engines, runner, setting

    request = json.loads(sys.stdin.readline())
    interpreter.install()
    torch.set_num_threads(1)
    record_launches()
    found = backends.find("triton")
    if found.load is None:
        raise SystemExit(found.reason)
    options = runner.Options(setting.SMALL, request["limit"], request["seed"], request.get("soak", SOAK))
    wanted = [case for case in cases.cases(options.limit) if case.name in request["cases"]]
    kinds = setting.variants("cpu", torch.float8_e4m3fn, quick=False)
    for variant in (kind for kind in kinds if kind.name in request["variants"]):
        for case in wanted:
            result = runner.run_case(case, variant, found.load(), engines.TapeEngine(), options)
            result.engine = "eager replay, interpreted"
            print(json.dumps(result.as_dict()), flush=True)


def record_launches() -> None:
    """Let the launcher's kernel be recorded on a tape, as one launch. Idempotent."""
    from vllm_aiter_mla.kernels.triton import launcher

    if not isinstance(launcher.decode_prep_kernel, _OnTape):
        launcher.decode_prep_kernel = _OnTape(launcher.decode_prep_kernel)


class _OnTape:
    """A kernel whose launches a tape sees."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        from vllm_aiter_mla.verify.tape import launch_foreign

        launch = self._kernel[grid]
        return lambda *given, **named: launch_foreign("decode_prep_kernel", lambda: launch(*given, **named))


if __name__ == "__main__":
    main()
