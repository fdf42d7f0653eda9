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

PLAN = "Plan"
"""The section of what did not run; it is marked so."""
SECTIONS = ("Serving", "Check", PLAN, "Status", "Timing", "Kernels")
"""In their order on the page."""

NOTHING_RAN, ON_CPU, ON_EMULATOR = "planned", "passed on a CPU", "passed on an emulator"
OUTCOMES = {
    "passed": "good", "engaged": "good", "failed": "bad", "cut off": "bad",
    "warning": "mind", "partly": "mind", "no gain": "mind",
    "skipped": "none", "unknown": "none", NOTHING_RAN: "none", ON_CPU: "none", ON_EMULATOR: "none",
    "engaged on a CPU": "none", "ended": "none", "compared": "none",
}  # fmt: skip
"""The colour of each word that is an outcome, as a class of the page's style: a word stands beside every colour."""
NO_CARD = "none: nothing here ran on a GPU"


@dataclass(frozen=True)
class Input:
    """A file that is read."""

    name: str  # on the page; no two inputs have the same
    folder: Path
    ranks: int = 0  # of a status file: how many ranks of its engine are among the inputs


@dataclass(frozen=True)
class Glance:
    """What the first screen says of one input."""

    word: str  # the outcome, one of ``OUTCOMES``
    what: str  # what was done, to which model
    card: str
    means: str
    skipped: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)  # besides those of the stamp
    run: str = ""  # the server, whose ranks share a glance


@dataclass
class Block:
    """A table with what stands above it."""

    heads: tuple[str, ...]
    chart: Markup
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)  # what went wrong


class Page:
    """The glances, and the blocks by section and title."""

    def __init__(self) -> None:
        self.input = Input("", Path())  # the one that is being read
        self.glances: dict[tuple[str, str, str], dict[str, list[str]]] = {}
        self.sections: dict[str, dict[str, Block]] = {section: {} for section in SECTIONS}

    def begin(self, glance: Glance, evidence: files.Stamp) -> None:
        """Add a glance to the first screen; the ranks of a server share one, with what each says."""
        versions = {"vLLM": evidence.vllm, "AITER": evidence.aiter, **glance.versions, "plugin": evidence.plugin}
        facts = {
            "Input": self.input.name,
            "Card": glance.card,
            "When": f"{evidence.time.replace('T', ' ').replace('+00:00', ' UTC')} on {evidence.host}",
            "Versions": ", ".join(f"{name} {value or 'not installed'}" for name, value in versions.items()),
            "Skipped": "; ".join(glance.skipped) or "nothing",
            "Means": glance.means,
        }
        shared = self.glances.setdefault((glance.word, glance.what, glance.run or self.input.name), defaultdict(list))
        for name, fact in facts.items():
            shared[name] += [fact] * (fact not in shared[name])

    def add(
        self,
        section: str,
        title: str,
        heads: Sequence[str] = (),
        rows: Iterable[Sequence[Any]] = (),
        chart: Chart = lambda title: "",
        notes: Iterable[str] = (),
        alarms: Iterable[str] = (),
    ) -> None:
        """Add a block, or new lines to the block of that title and table: the ranks of an engine say the same.

        A table whose first column is the input takes the rows of all inputs. Another input's table gets its name.
        ``rows`` have one cell per head of the table; a list in a cell is folded. ``chart`` draws SVG for a title.
        """
        blocks, cells, heads = self.sections[section], [*map(tuple, rows)], tuple(heads)
        of_all_inputs = heads[:1] == ("input",)
        while not of_all_inputs and title in blocks and (blocks[title].heads, blocks[title].rows) != (heads, cells):
            title += f" ({self.input.name})"
        if is_new := title not in blocks:
            blocks[title] = Block(heads, Markup(chart(title)))
        block = blocks[title]
        block.rows += cells if is_new or of_all_inputs else []
        block.notes += [note for note in dict.fromkeys(notes) if note not in block.notes]
        block.alarms += alarms
