"""Time the start of an engine with the flag off and on, by phase: first with an empty compile cache, then warm.

    python tools/start_cost.py [--starts N] [--registrations N]

CPU seconds of Python and torch in the engine's process, because other work on the machine moves wall time more. Each
engine is one process over vLLM's default compiled pieces, an fp8 cache, emulated graphs and Model Runner V2, on the
rehearsal card: AITER and Triton's kernels are emulated, so the phases that run kernels say nothing about a card. The
C++ compilers of a CPU are shown apart.

Registration is what ``load_general_plugins`` pays for this plugin, in fresh processes of each kind that vLLM starts.
The sandbox imports the plugin's modules with the flag off too, so what the flag imports is timed there and added.

Warm starts take turns (off, on, on, off), and of each phase the least counts, which may be too high by the distance to
the second least. Exit status 1 where registration takes more than ``REGISTRATION_MS``, or a warm start with the flag on
more than ``MOST`` of flag off, the timing of the kernels left out; 2 where that distance leaves it open.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.common import Parser, RunError, UsageError, aligned, guarded
from tools.counting.start import IMPORTS, KINDS, PHASES, PLUGIN, REGISTRATION, TIMING

ROOT = Path(__file__).resolve().parents[1]
MOST, REGISTRATION_MS = 1.05, 20.0
SIDES = ("off", "on")
MODEL = {"num_hidden_layers": 2, "num_attention_heads": 16}
MET, MISSED, OPEN = "met", "MISSED", "OPEN: the spread is too large to decide"
Record = dict[str, Any]


@dataclass(frozen=True)
class Least:
    """The least of some figures; the true one may be lower by the distance to the second least."""

    high: float
    low: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Least:
        """Of two figures or more."""
        least, second, *_ = sorted(figures)
        return cls(least, max(2 * least - second, 0.0))

    def __add__(self, other: Least) -> Least:
        return Least(self.high + other.high, self.low + other.low)

    def __truediv__(self, other: Least) -> Least:
        return Least(self.high / other.low if other.low else float("inf"), self.low / other.high)

    def against(self, limit: float) -> str:
        """Whether it is at most ``limit``."""
        return MET if self.high <= limit else MISSED if self.low > limit else OPEN


@dataclass(frozen=True)
class Starts:
    """What was measured."""

    first: dict[str, Record]  # by side, with an empty compile cache
    warm: dict[str, list[Record]]  # by side
    fresh: dict[str, list[dict[str, float]]]  # by kind of process: seconds of registration and of the flag's imports

    @property
    def imports_s(self) -> float:
        """What the flag imports in all kinds of process."""
        return sum(min(one[IMPORTS] for one in found) for found in self.fresh.values())

    def phase(self, side: str, name: str) -> Least:
        """One phase of the warm starts of a side."""
        return Least.of([one["phases"][name] for one in self.warm[side]])

    def whole(self, side: str) -> Least:
        """Warm starts of a side, without the timing of the kernels."""
        imports = self.imports_s * (side == "on")
        return sum((self.phase(side, name) for name in PHASES if name != TIMING), Least(imports, imports))

    def registration_ms(self, kind: str) -> Least:
        """Milliseconds of registration in one kind of process."""
        return Least.of([1e3 * one[REGISTRATION] for one in self.fresh[kind]])


def run(argv: Sequence[str]) -> int:
    parser = Parser(__doc__, "start_cost.py [--starts N] [--registrations N]")
    parser.add_argument("--starts", type=int, default=4, help="warm starts of each side")
    parser.add_argument("--registrations", type=int, default=3, help="fresh processes of each kind")
    options = parser.parse_args(argv)
    for name, count in vars(options).items():
        if count < 2:
            raise UsageError(f"--{name} {count}: must be at least 2, or nothing tells the spread")
    found = measure(options.starts, options.registrations)
    show(found)
    said = verdicts(found)
    print("\n".join(f"{verdict}: {line}" for line, verdict in said.items()))
    return 1 if MISSED in said.values() else 2 if OPEN in said.values() else 0


def measure(starts: int, registrations: int) -> Starts:
    """Start everything, one process at a time."""
    fresh: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    warm: dict[str, list[Record]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="start-cost-") as folder:
        work = Path(folder)
        for _ in range(registrations):
            for kind, found in fresh.items():
                say(f"registration in the {kind}")
                found.append(child(_fresh(), "register", kind, str(work / "bytecode"), str(work / "out")))
        first = {side: start(work, side) for side in SIDES}
        for turn in range(starts):
            for side in SIDES if turn % 2 == 0 else reversed(SIDES):
                warm[side].append(start(work, side))
                if not warm[side][-1]["loaded"]:
                    raise RunError(f"flag {side}: vLLM compiled again, so this was no warm start")
    return Starts(first, warm, fresh)


def start(work: Path, side: str) -> Record:
    """Start an engine over the compile cache of its side, and return what its process wrote."""
    from tests.sandbox import engine, rehearsal_card
    from tests.sandbox.spec import Emulation, EngineSpec, PluginOptions, VllmOptions, flag_off, save

    spec = EngineSpec(
        (),
        VllmOptions(model=MODEL, kv_cache_dtype="fp8", compile_cache=True),
        PluginOptions(integration="auto", rounding="single"),
        Emulation(graphs=True, arch="gfx942", attention="aiter"),
    )
    say(f"engine, flag {side}")
    save(spec if side == "on" else flag_off(spec), work / "spec")
    environment = engine.environment_for(spec, work / side, work / f"{side}-inductor")
    environment["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # else it starts a dozen Pythons that ask what the processor can do
    environment[rehearsal_card.VARIABLE] = json.dumps(asdict(rehearsal_card.Scenario()))
    card = Path(rehearsal_card.__file__).parent / "rehearsal_path"
    environment["PYTHONPATH"] = os.pathsep.join((str(card), environment["PYTHONPATH"]))
    record = child(environment, "engine", str(work / "spec"), str(work / "out"))
    engaged = sum(len(rank["engaged"]) for rank in record["status"])
    if engaged != (MODEL["num_hidden_layers"] if side == "on" else 0):
        raise RunError(f"flag {side}: {engaged} layers run the plugin's kernels")
    return record


def say(what: str) -> None:
    print(f"start_cost: {what} ...", file=sys.stderr, flush=True)


def _fresh() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "VLLM_PLUGINS": PLUGIN, "PYTHONPATH": path, "VLLM_NO_USAGE_STATS": "1"}


def child(environment: Mapping[str, str], *arguments: str) -> Record:
    """Run a process of ``tools.counting.start`` and return its figures, which it writes to the last argument."""
    command = [sys.executable, "-m", "tools.counting.start", *arguments]
    done = subprocess.run(
        command, env=dict(environment), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", check=False,
    )  # fmt: skip
    if done.returncode:
        raise RunError(f"{' '.join(arguments)} ended with {done.returncode}:\n" + done.stdout[-3000:])
    found: Record = json.loads(Path(arguments[-1]).read_text())
    return found


def verdicts(found: Starts) -> dict[str, str]:
    """Return whether each goal is met, by what is said of it."""
    ratio = found.whole("on") / found.whole("off")
    said = {f"warm start {ratio.low:.2f} to {ratio.high:.2f} of flag off, at most {MOST}": ratio.against(MOST)}
    for kind in found.fresh:
        taken = found.registration_ms(kind)
        line = f"registration in the {kind} {taken.high:.1f} ms, at most {REGISTRATION_MS:.0f}"
        said[line] = taken.against(REGISTRATION_MS)
    return said


def show(found: Starts) -> None:
    print("CPU seconds of a start; of the warm starts the least of each phase")
    first = [found.first[side]["phases"] for side in SIDES]
    rows = [(name, *(one[name] for one in first), *(found.phase(side, name).high for side in SIDES)) for name in PHASES]
    rows += [("imports of the flag, all processes", 0.0, found.imports_s, 0.0, found.imports_s)]
    rows += [("whole start", *(sum(row[at] for row in rows) for at in range(1, 5)))]
    children = [*(found.first[side]["children"] for side in SIDES)]
    children += [min(one["children"] for one in found.warm[side]) for side in SIDES]
    rows += [("apart: C++ compilers and probes", *children)]
    head = ("phase", "first, off", "first, on", "ratio", "warm, off", "warm, on", "ratio")
    print("\n".join(aligned(head, [_cells(*row) for row in rows])))
    for side in SIDES:
        wholes = sorted(sum(one["phases"].values()) for one in found.warm[side])
        print(f"warm starts, flag {side}: {', '.join(f'{whole:.1f}' for whole in wholes)} s")


def _cells(name: str, *seconds: float) -> list[str]:
    cells = [name]
    for off, on in (seconds[:2], seconds[2:]):
        cells += [f"{off:.2f}", f"{on:.2f}", f"{on / off:.2f}" if off >= 0.05 else "-"]
    return cells


if __name__ == "__main__":
    sys.exit(guarded("start_cost", run))
