"""Time a newcomer's first hour: a fresh clone, cold caches, the install, `make demo` and `make test`.

    python tools/first_hour.py [--work FOLDER] [--json FILE]

Clones the commit that is checked out (changes that are not committed are not in it), and gives it empty caches of pip,
vLLM, Inductor and Triton. Exit status 1 where a command fails or takes longer than its bound; the bounds hold on two
cores that do nothing else, so the load is printed too. `--work` keeps the clone and the commands' output.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.common import Parser, RunError, UsageError, guarded, table, writable  # noqa: E402

# Seconds by command. None: the network decides.
BOUNDS: dict[str, float | None] = {"make setup": None, "make demo": 180.0, "make test": 300.0}
# Variables that name a cache, or would let a tool find one of an earlier run.
CACHES = ("PIP_CACHE_DIR", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        command: as typed.
        seconds: of wall clock.
        status: its exit status.
        busy_before: cores that other processes used in the second before it.
    """

    command: str
    seconds: float
    status: int
    busy_before: float

    @property
    def good(self) -> bool:
        """Whether it passed within its bound."""
        bound = BOUNDS[self.command]
        return self.status == 0 and (bound is None or self.seconds <= bound)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0, 1 when a step fails or is late, 2 for a wrong option."""
    return guarded("first_hour", lambda: run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Clone, time, print."""
    parser = Parser(__doc__, "first_hour.py [--work FOLDER] [--json FILE]")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    writable({"--json": options.json})
    if options.work and options.work.exists() and any(options.work.iterdir()):
        raise UsageError(f"--work {options.work}: must be empty, or not there yet")
    with tempfile.TemporaryDirectory(prefix="first-hour-") as scratch:
        folder = (options.work or Path(scratch)).resolve()
        steps = time_all(clone(folder), folder)
    print(printed(steps))
    if options.json:
        from vllm_aiter_mla import evidence

        rows = [asdict(step) | {"bound": BOUNDS[step.command]} for step in steps]
        evidence.write(options.json, {"steps": rows} | evidence.stamp("first_hour", 1))
    return 0 if len(steps) == len(BOUNDS) and all(step.good for step in steps) else 1


def clone(folder: Path) -> Path:
    """A clone of the commit of this checkout."""
    tree = folder / "clone"
    done = subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RunError(f"git clone: {done.stderr.strip()}")
    return tree


def time_all(tree: Path, folder: Path) -> list[Step]:
    """Run the commands one after the other; the first that fails is the last."""
    caches = {name: str(folder / name.lower()) for name in CACHES}
    for path in caches.values():
        Path(path).mkdir(parents=True, exist_ok=True)
    # A virtual environment of the caller must not be the one that is found.
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not (Path(p) / "../pyvenv.cfg").exists())
    environment = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"} | caches | {"PATH": path}
    steps: list[Step] = []
    for command in BOUNDS:
        print(f"first_hour: {command} ...", file=sys.stderr, flush=True)
        log = folder / f"{command.replace(' ', '-')}.log"
        steps.append(timed(command, tree, log, environment))
        if steps[-1].status:
            print("\n".join(log.read_text().splitlines()[-20:]))
            break
    return steps


def timed(command: str, tree: Path, log: Path, environment: dict[str, str]) -> Step:
    """Run one command with its output in a file."""
    before = busy()
    start = time.monotonic()
    with log.open("w") as output:
        done = subprocess.run(command.split(), cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT)
    return Step(command, time.monotonic() - start, done.returncode, before)


def busy(seconds: float = 1.0) -> float:
    """Cores in use now, by Linux's own count of ticks; other processes', as this one sleeps."""

    def ticks() -> tuple[int, int]:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]

    total, idle = ticks()
    time.sleep(seconds)
    now_total, now_idle = ticks()
    whole = max(now_total - total, 1)
    return round((os.cpu_count() or 1) * (whole - (now_idle - idle)) / whole, 2)


def printed(steps: Sequence[Step]) -> str:
    """The table."""
    rows = []
    for step in steps:
        bound = BOUNDS[step.command]
        verdict = "ok" if step.good else f"failed with status {step.status}" if step.status else "late"
        rows.append((step.command, clock(step.seconds), clock(bound) if bound else "", step.busy_before, verdict))
    head = ("command", "took", "bound", f"cores busy before, of {os.cpu_count()}", "")
    return "\n".join(table(head, rows, "---"))


def clock(seconds: float) -> str:
    """As ``3 min 05 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


if __name__ == "__main__":
    sys.exit(main())
