# SPDX-License-Identifier: Apache-2.0
"""What a page is made of: glances on the first screen, and titled blocks of tables, charts and lines by section."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vllm_aiter_mla import files
from vllm_aiter_mla.commands.report.charts import Chart

# Section, and where its content comes from.
SECTIONS = {
    "Serving": "tools/serving.py --json",
    "Check": "check --json",
    "Plan": "check --json with a model",
    "Status": "a status file",
    "Compile ranges": "a status file, or check --json with a model",
    "Launches": "check --json on a GPU, or with a model for formulas",
    "Timing": "check --json on a GPU",
    "Kernels": "check --json",
    "Versions": "any file",
}

NOTHING_RAN = "planned"
ON_CPU = "passed on a CPU"
NO_CARD = "none: nothing here ran on a GPU"


@dataclass(frozen=True)
class Glance:
    """What the first screen says of one input."""

    word: str  # the outcome, one of ``charts.OUTCOMES``
    what: str  # what was done, to which model
    card: str
    means: str
    skipped: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)  # besides those of the stamp
    run: str = ""  # the server, whose ranks share a glance


class Page:
    """The glances, and the blocks by section and title."""

    def __init__(self) -> None:
        self.input = ""  # the name of the one that is being read; no two have the same
        self.folder = Path()  # where that one lies
        self.glances: dict[tuple[str, str, str], dict[str, list[str]]] = {}
        self.sections: dict[str, dict[str, dict[str, Any]]] = {section: {} for section in SECTIONS}

    def begin(self, glance: Glance, evidence: files.Stamp) -> None:
        """Add a glance to the first screen; the ranks of a server share one, with what each says."""
        versions = {"vLLM": evidence.vllm, "AITER": evidence.aiter, **glance.versions, "plugin": evidence.plugin}
        facts = {
            "Input": self.input,
            "Card": glance.card,
            "When": f"{evidence.time.replace('T', ' ').replace('+00:00', ' UTC')} on {evidence.host}",
            "Versions": ", ".join(f"{name} {value or 'not installed'}" for name, value in versions.items()),
            "Skipped": "; ".join(glance.skipped) or "nothing",
            "Means": glance.means,
        }
        said = self.glances.setdefault((glance.word, glance.what, glance.run or self.input), defaultdict(list))
        for name, fact in facts.items():
            said[name] += [fact] * (fact not in said[name])

    def add(
        self,
        section: str,
        title: str,
        heads: Sequence[str] = (),
        rows: Iterable[Sequence[Any]] = (),
        chart: Chart = lambda title: "",
        notes: Iterable[str] = (),
        alarms: Iterable[str] = (),
        planned: bool = False,
    ) -> None:
        """Add a block, or new lines to the block of that title and table: the ranks of an engine say the same.

        A table whose first column is the input takes the rows of all inputs. Another input's table gets its name.
        ``rows`` have one cell per head of the table; a list in a cell is folded. ``chart`` draws SVG for a title.
        ``notes`` are lines above the table, ``alarms`` say what went wrong. A ``planned`` block is marked as such.
        """
        blocks, rows, heads = self.sections[section], [*map(tuple, rows)], tuple(heads)
        of_all = heads[:1] == ("input",)
        while not of_all and title in blocks and (blocks[title]["heads"], blocks[title]["rows"]) != (heads, rows):
            title += f" ({self.input})"
        if new := title not in blocks:
            empty: dict[str, Any] = {"rows": [], "notes": [], "alarms": []}
            blocks[title] = {"heads": heads, "chart": Markup(chart(title)), "planned": planned, **empty}
        block = blocks[title]
        block["rows"] += rows if new or of_all else []
        block["notes"] += [note for note in dict.fromkeys(notes) if note not in block["notes"]]
        block["alarms"] += alarms
