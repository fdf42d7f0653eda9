"""Count what one layer launches, allocates and moves in each kind of batch: vLLM, vLLM's own fusions, and ours.

    python tools/ledger.py [--quick | --integration module] [--kv-cache-dtype fp8|auto|both] [--json FILE] [--page FILE]

Each side is a real engine of the sandbox (two layers, plain GEMMs, over the simulated AITER), driven through one
batch of each kind and counted by torch's dispatcher and in Inductor's code. With --quick it is the ops of one layer
alone, without an engine. docs/ledger.md says what is counted. Exit status 1 where ours is above the lower of the other
two in launches, allocations or bytes of any row, or where our op did not do what a kind of batch is there to count.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.common import Parser, RunError, UsageError, guarded, writable  # noqa: E402
from tools.counting.counter import Event  # noqa: E402
from tools.counting.launches import TABLE  # noqa: E402
from vllm_aiter_mla.admission import INTEGRATIONS  # noqa: E402

SIDES = ("vllm", "vLLM's own fusions", "ours")
CACHES = ("fp8", "auto")
AITER_OP = "aiter::fused_qk_rope_concat_and_cache_mla"
IN_PLACE = "_C_cache_ops::concat_and_cache_mla_rope_fused"
BRANCHES = {
    "all decode": AITER_OP,
    "padded decode": AITER_OP,
    "one prefill among decodes": IN_PLACE,
    "all short prompts": IN_PLACE,
    "one long prompt inside L": IN_PLACE,
    "chunked: the last piece": IN_PLACE,
}
"""What our op launches in each kind of batch; in the others it does not run, or has no rows."""
SHOWN = ("all decode", "one prefill among decodes")
ABOVE = {"above L": IN_PLACE}
"""The module integration has no compile ranges: its op runs in every batch."""
MARKS = {
    name: (f"<!-- {name}: begin -->", f"<!-- {name}: end -->")
    for name in ("ledger", "ledger, module integration", "ledger, ops alone")
}
"""Around the tables of the engines, by integration, and around those of ``--quick``."""
LAUNCHES = ("<!-- launches: begin -->", "<!-- launches: end -->")
TIMEOUT_S = 1800


class Cost(NamedTuple):
    """What one layer costs in one batch: kernels launched, buffers allocated, bytes read and written."""

    launches: int
    allocations: int
    moved: int

    def __str__(self) -> str:
        """As a cell: ``launches / allocations / bytes``."""
        return f"{self.launches} / {self.allocations} / {self.moved}"


class Row(NamedTuple):
    """One kind of batch in one graph mode; the costs in the order of ``SIDES``."""

    cache: str
    kind: str
    mode: str
    costs: tuple[Cost, ...]


Events = Mapping[str, Sequence[Event]]
Counted = Mapping[str, Sequence[Events]]


def main() -> int:
    """Run, print, judge."""
    parser = Parser(__doc__, "ledger.py [options]")
    parser.add_argument("--quick", action="store_true", help="the ops of one layer, without an engine")
    parser.add_argument("--integration", choices=INTEGRATIONS, default="passes", help="who emits on our side")
    parser.add_argument("--kv-cache-dtype", choices=(*CACHES, "both"), default="both", dest="cache")
    parser.add_argument("--json", type=Path, help="write every event there")
    parser.add_argument("--page", type=Path, help="put the tables between the marks of this page")
    options = parser.parse_args()
    module = options.integration == "module"
    if module and options.quick:
        raise UsageError("--quick --integration module: the ops alone are the same, whoever emits them")
    marks = MARKS["ledger, ops alone" if options.quick else "ledger, module integration" if module else "ledger"]
    writable({"--json": options.json, "--page": options.page})
    if options.page:
        _check_page(options.page, marks)
    caches = CACHES if options.cache == "both" else (options.cache,)
    counted = count_all(caches, quick=options.quick, integration=options.integration)
    rows = [row for cache, sides in counted.items() for row in rows_of(cache, sides)]
    text = render(counted)
    print(text)
    if options.json:
        write_json(options.json, counted)
    if options.page:
        put(options.page, text, marks)
        put(options.page, launches(), LAUNCHES)
    found = [f"ABOVE VLLM: {line}" for line in violations(rows)]
    found += [
        f"ANOTHER BRANCH: {line}"
        for cache, (*_, ours) in counted.items()
        for line in strays(cache, ours, ABOVE if module else {})
    ]
    print("\n".join(found) or "ours is at most vLLM's own strongest in every row")
    return 1 if found else 0


def count_all(caches: Sequence[str], *, quick: bool, integration: str = "passes") -> Counted:
    """The events of every side by cache, in the order of ``SIDES``."""
    if quick:
        from tools.counting import ops

        return {cache: [ops.count(side, cache) for side in SIDES] for cache in caches}
    with tempfile.TemporaryDirectory(prefix="aiter-mla-ledger-") as folder:
        return {cache: [count(side, cache, Path(folder), integration) for side in SIDES] for cache in caches}


def count(side: str, cache: str, work: Path, integration: str) -> Events:
    """The events of one layer by kind of batch, from an engine in a process of its own.

    Args:
        side: one of ``SIDES``.
        cache: one of ``CACHES``.
        work: folder of what the engines share: compiled C++ kernels, and vLLM's notes on the model class.
        integration: one of ``INTEGRATIONS``, on our side.

    Raises:
        RunError: the engine failed.
    """
    from tests.sandbox.engine import environment_for
    from tests.sandbox.spec import save

    spec = spec_of(side, cache, integration)
    print(f"counting {side}, {cache} KV cache", file=sys.stderr, flush=True)
    save(spec, work / "spec")
    environment = environment_for(spec, work / "cache", work / "inductor")
    environment["PYTHONPATH"] += f":{ROOT}"
    done = subprocess.run(
        [sys.executable, "-m", "tools.counting.engine", str(work / "spec"), str(work / "out")],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    if done.returncode:
        raise RunError(f"the engine of {side} failed:\n{done.stdout[-4000:]}")
    found = json.loads((work / "out").read_text())
    return {kind: [Event(**event) for event in events] for kind, events in found.items()}


def spec_of(side: str, cache: str, integration: str = "passes") -> Any:
    """The engine of a side; all three see the same card, the same ranges and the same pieces."""
    from tests.sandbox.spec import EngineSpec
    from tools.counting.engine import LIMIT, TOKENS

    ours = EngineSpec(
        scenarios=(), linear="aten", model={"num_hidden_layers": 2}, max_num_seqs=LIMIT, max_num_batched_tokens=TOKENS,
        fake_arch="gfx942", graphs="none", kernel="aiter", rounding="single", vllm_pass=True, kv_cache_dtype=cache,
        additional={"integration": integration}, compilation={"use_inductor_graph_partition": True},
    )  # fmt: skip
    if side == "ours":
        return ours
    return replace(ours, enabled=False, kernel="auto", vllm_pass=side != "vllm")


def rows_of(cache: str, sides: Sequence[Events]) -> list[Row]:
    """A row for each kind and each mode that it can run in."""
    return [
        Row(cache, kind, said, tuple(cost(events[kind], mode) for events in sides))
        for kind in sides[0]
        for said, mode in modes(kind).items()
    ]


def modes(kind: str) -> dict[str, str]:
    """Graph mode by its name in the table: vLLM replays full graphs for decode rows alone."""
    whole = {"full, derived": "full"} if BRANCHES.get(kind) == AITER_OP else {"full, runs piecewise": "piecewise"}
    return {"none": "none", "piecewise": "piecewise"} | whole


def cost(events: Iterable[Event], mode: str) -> Cost:
    """The sum of a layer's events; what a graph replays asks the allocator for nothing."""
    found = list(events)
    asked = [event for event in found if mode == "none" or (mode == "piecewise" and not event.captured)]
    return Cost(
        sum(event.launches for event in found),
        sum(event.allocations for event in asked),
        sum(event.moved for event in found),
    )


def violations(rows: Iterable[Row]) -> list[str]:
    """Where ours is above the lower of the other two, one line each."""
    found = []
    for row in rows:
        *others, ours = row.costs
        for name, value in ours._asdict().items():
            least = min(getattr(other, name) for other in others)
            if value > least:
                found.append(
                    f"{row.cache} cache, {row.kind}, graphs {row.mode}: {name} {value}, unmodified vLLM {least}"
                )
    return found


def strays(cache: str, ours: Events, more: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """The kinds of batch in which our op did not launch what it is there to launch, one line each."""
    found, branches = [], {**BRANCHES, **more}
    for kind, events in ours.items():
        ran = [event.name for event in events if event.name in (AITER_OP, IN_PLACE) and not event.captured]
        wanted = [branches[kind]] if kind in branches else []
        if ran != wanted:
            found.append(f"{cache} cache, {kind}: launches of our op {ran}, expected {wanted}")
    return found


def in_words(events: Iterable[Event]) -> str:
    """Names of the launches in order."""
    names = [(event.name.rpartition("::")[2], event.captured) for event in events if event.launches]
    return ", ".join(f"[{name}]" if captured else name for name, captured in names)


def render(counted: Counted) -> str:
    """The tables as Markdown."""
    lines = []
    for cache, sides in counted.items():
        lines += [f"### KV cache: {cache}", "", table(("batch", "graphs", *SIDES))]
        lines += [line((row.kind, row.mode, *map(str, row.costs))) for row in rows_of(cache, sides)]
        lines += ["", table(("batch", "side", "launches in order; [replayed by a piecewise graph]"))]
        lines += [
            line((kind, side, in_words(of[kind]))) for kind in SHOWN for side, of in zip(SIDES, sides, strict=True)
        ]
        lines.append("")
    return "\n".join(lines).strip()


def launches() -> str:
    """The table of what one launch is, as Markdown."""
    return "\n".join([table(("what", "launches", "bytes", "by")), *map(line, TABLE)])


def table(head: Sequence[str]) -> str:
    """The head of a Markdown table."""
    return f"{line(head)}\n{'|---' * len(head)}|"


def line(cells: Sequence[str]) -> str:
    """A row of one."""
    return f"| {' | '.join(cells)} |"


def read(text: str) -> list[Row]:
    """The rows of a page that ``render`` wrote."""
    found, cache = [], ""
    for text_line in text.splitlines():
        cache = text_line.removeprefix("### KV cache: ") if text_line.startswith("### KV cache: ") else cache
        cells = [cell.strip() for cell in text_line.strip("|").split("|")]
        costs = [re.fullmatch(r"(\d+) / (\d+) / (\d+)", cell) for cell in cells[2:]]
        if len(costs) == len(SIDES) and all(costs):
            numbers = tuple(Cost(*map(int, match.groups())) for match in costs if match)
            found.append(Row(cache, cells[0], cells[1], numbers))
    return found


def _check_page(page: Path, marks: tuple[str, str]) -> None:
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"--page {page}: {error}") from error
    for mark in marks:
        if mark not in text:
            raise UsageError(f"--page {page}: no line {mark}")


def put(page: Path, text: str, marks: tuple[str, str]) -> None:
    """Replace what stands between the marks of ``page``."""
    before, _, rest = page.read_text(encoding="utf-8").partition(marks[0])
    after = rest.partition(marks[1])[2]
    page.write_text(f"{before}{marks[0]}\n{text}\n{marks[1]}{after}", encoding="utf-8")


def write_json(path: Path, counted: Counted) -> None:
    """Every event of every side."""
    from vllm_aiter_mla import files

    events = {
        cache: {
            side: {kind: [asdict(event) for event in found] for kind, found in of.items()}
            for side, of in zip(SIDES, sides, strict=True)
        }
        for cache, sides in counted.items()
    }
    files.write(path, {"events": events} | files.stamp("ledger", 1))


if __name__ == "__main__":
    sys.exit(guarded("ledger", main))
