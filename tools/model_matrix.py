"""Run every dense MLA architecture of vLLM's in the sandbox, flag off and on, and compare.

    python tools/model_matrix.py [--only TEXT] [--json FILE]

Each row is a small random checkpoint with the real widths of a head (tools/model_configs.py), in the real engine on
this CPU: layers engaged, or the reason why none does; tokens equal, over short and mixed prompts. Exit status 1 where a
row is not what it should be. About two minutes a row.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.sandbox import compare, engine, runs  # noqa: E402
from tests.sandbox.spec import EngineResult, EngineSpec  # noqa: E402
from tools.common import Parser, UsageError, guarded, writable  # noqa: E402
from tools.model_configs import ROWS, Row  # noqa: E402

Run = Callable[[EngineSpec], EngineResult]


@dataclass(frozen=True)
class Outcome:
    """What one row gave.

    Attributes:
        model: its name.
        engaged: MLA layers that took the fast path.
        total: MLA layers of the engine.
        reason: why the others did not, or why vLLM itself cannot run it here.
        tokens: compared with the flag off.
        equal: of them, the same.
        good: whether it is what the row says.
    """

    model: str
    engaged: int = 0
    total: int = 0
    reason: str = ""
    tokens: int = 0
    equal: int = 0
    good: bool = False


def main() -> int:
    """Run, print, judge."""
    parser = Parser(__doc__, "model_matrix.py [--only TEXT] [--json FILE]")
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    writable({"--json": options.json})
    chosen = {name: row for name, row in ROWS.items() if options.only.lower() in name.lower()}
    if not chosen:
        raise UsageError(f"--only: no model is called like {options.only!r}; there are {', '.join(ROWS)}")
    with tempfile.TemporaryDirectory(prefix="model-matrix-") as shared:
        outcomes = []
        for name, row in chosen.items():
            outcomes.append(outcome(name, row, lambda spec: engine.run(spec, inductor=Path(shared))))
            print(line(outcomes[-1]), flush=True)
    if options.json:
        from vllm_aiter_mla import files

        files.write(options.json, {"rows": [asdict(o) for o in outcomes]} | files.stamp("model_matrix", 1))
    return 0 if all(found.good for found in outcomes) else 1


# A plugin that is off cuts no range: unmodified vLLM without the sandbox's cut, which rounds otherwise.
UNCUT = {"use_inductor_graph_partition": False, "compile_ranges_endpoints": []}


def spec_of(row: Row) -> EngineSpec:
    """The engine with the flag on."""
    return EngineSpec(
        scenarios=("short", "mixed"), config=row.config, draft_config=row.draft, drafts=row.drafts, linear="aten"
    )


def outcome(name: str, row: Row, run: Run) -> Outcome:
    """Run one row.

    Args:
        name: of the model.
        row: what to run, and what should come out.
        run: starts an engine and waits for it.
    """
    spec = spec_of(row)
    try:
        vllm_own = run(replace(spec, enabled=False, compilation=UNCUT if row.not_mla else {}))
    except engine.EngineFailedError as error:
        return Outcome(name, reason=row.vllm_fails or cause(error), good=bool(row.vllm_fails))
    ours = run(spec)
    figures = compare.compare(vllm_own, ours).values()
    tokens, equal = sum(f.tokens for f in figures), sum(f.tokens_equal for f in figures)
    records = ours.status
    engaged, total = sum(len(r["engaged"]) for r in records), sum(r["total"] for r in records)
    codes = {why[0] for record in records for why in record["skipped"].values()}
    exact = all(runs.EXACT.holds(f) for f in figures)
    as_said = codes == {row.reason} if row.reason else engaged == total == row.layers
    if row.not_mla:
        as_said = as_said and any(" not_mla: " in line for line in ours.log)
    good = exact and as_said and not row.vllm_fails
    return Outcome(name, engaged, total, row.not_mla or ", ".join(sorted(codes)), tokens, equal, good)


def cause(error: engine.EngineFailedError) -> str:
    """The last exception that the engine printed."""
    lines = [text for text in error.log.splitlines() if text.strip()]
    raised = [text for text in lines if re.search(r"^(\S+: |.*\] *)?[\w.]+(Error|Exception|Unsupported): ", text)]
    return (raised or lines)[-1]


def line(found: Outcome) -> str:
    """One row of the table, in Markdown."""
    outcome = "not compared" if not found.tokens else f"engaged {found.engaged}/{found.total}"
    tokens = f"{found.equal}/{found.tokens} equal" if found.tokens else ""
    cells = (found.model, outcome, tokens, found.reason, "" if found.good else "UNEXPECTED")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(guarded("model_matrix", main))
